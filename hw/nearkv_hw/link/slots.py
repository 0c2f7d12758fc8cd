"""Messages in slots: where each lies, by the tables of `abi.flits`."""

from amaranth.hdl import Cat, Const, Mux, Signal, Value

from ..abi.flits import HEADER_BITS, SLOT_BITS


def slot_of(flit, n):
    """What slot `n` of a flit may hold of messages; slot 0's begins behind the header."""
    return flit[n * SLOT_BITS + (0 if n else HEADER_BITS) : (n + 1) * SLOT_BITS]


def chunk_of(flit, n):
    """The whole of slot `n`, which is a chunk of data if the slot holds data."""
    return flit[n * SLOT_BITS : (n + 1) * SLOT_BITS]


def put(m, slot_format, messages):
    """The slot's bits with a message at each place of its format.

    Parameters
    ----------
    messages : for each place its message; one that is not there is 0. Places beyond them stay empty.
    """
    slot = Signal(SLOT_BITS)
    for place, message in zip(slot_format.places, messages, strict=False):
        for low, at, width in place.pieces:
            m.d.comb += slot[at : at + width].eq(message[low : low + width])
    return slot


def take(slot, place):
    """The message at a place of a slot."""
    return Cat(slot[at : at + width] for _, at, width in sorted(place.pieces))


def converted(message, source, target, **given):
    """A message with the fields of one layout as another has them, by name.

    Fields of `target` that `source` lacks are those of `given`, else zero; so are reserved ones.
    """
    fields = []
    for field in target:
        if field.name in given:
            fields.append(Value.cast(given[field.name])[: field.width])
        elif field.reserved or field.name not in [f.name for f in source]:
            fields.append(Const(0, field.width))
        else:
            at = source.offset(field.name)
            fields.append(message[at : at + field.width])
    return Cat(fields)


def rotated(m, items, amount, name):
    """The items from number `amount` on and then those before it: a multiplexer for each bit of `amount`.

    Parameters
    ----------
    items : values of one width, a power of two of them.
    name : of the signals in between.
    """
    items = [Value.cast(item) for item in items]
    for k, bit in enumerate(amount):
        turned = []
        for n, item in enumerate(items):
            signal = Signal(len(item), name=f"{name}_by_{1 << k}_{n}")
            m.d.comb += signal.eq(Mux(bit, items[(n + (1 << k)) % len(items)], item))
            turned.append(signal)
        items = turned
    return items
