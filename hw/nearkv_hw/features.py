"""What the RTL has beyond plain jobs; the identity line says it, and tests open the model with as much."""

from .abi import Feature

FEATURES = (
    Feature.NARROW
    | Feature.SCALES
    | Feature.CODEBOOKS
    | Feature.SHORT_ROWS
    | Feature.LATENT
    | Feature.LARGE_ROWS
    | Feature.SOFTCAP
    | Feature.ALIBI
    | Feature.QUERY_ROWS
    | Feature.TREE
    | Feature.RANGES
    | Feature.OUTPUT_SCALE
    | Feature.SELECTION
)
