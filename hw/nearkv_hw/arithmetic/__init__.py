"""Arithmetic of the contract: decode, binned sums, score, weight, reciprocal, rounding."""
