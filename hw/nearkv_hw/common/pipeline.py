"""Steps of pipelines that never wait: values some cycles later, and products of two cycles."""

from amaranth.hdl import Cat, Signal


def stage(m, value, shape=None):
    """A value a cycle later, in a register of its own shape or another."""
    register = Signal(value.shape() if shape is None else shape, reset_less=True)
    m.d.sync += register.eq(value)
    return register


def later(m, value, cycles):
    """A value some cycles later."""
    for _ in range(cycles):
        value = stage(m, value)
    return value


def split_product(m, a, b):
    """The product of two numbers a cycle later, from multiplications that fit an 18-bit multiplier.

    Parameters
    ----------
    a : at most 36 bits; may be signed.
    b : at most 36 bits, unsigned.
    """
    a_half, b_half = len(a) // 2, len(b) // 2
    a_high = a[a_half:].as_signed() if a.shape().signed else a[a_half:]
    low_low, low_high, high_low, high_high = (
        stage(m, x * y) for x in (a[:a_half], a_high) for y in (b[:b_half], b[b_half:])
    )
    outer, middle = Cat(low_low, high_high), (low_high << b_half) + (high_low << a_half)
    product = (outer + middle)[: len(a) + len(b)]
    return product.as_signed() if a.shape().signed else product
