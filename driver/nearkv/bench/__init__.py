"""Measurements behind `nearkv bench`: each group is a module that returns named results."""
