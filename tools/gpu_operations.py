"""Which torch operations give one result on CPU and GPU: the claims that the reference rests on, as code.

Each operation says which claim it belongs to and whether its bits must be equal. Those that need not be equal
are run too and only reported: they are why the reference does without them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields

import torch
from torch import Tensor

COUNT = 1 << 16
INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float32, torch.float64)


@dataclass
class Inputs:
    """What operations work on, made on the CPU and moved to the device under test."""

    first: dict[torch.dtype, Tensor]
    second: dict[torch.dtype, Tensor]
    shift: Tensor
    index: Tensor
    positive: Tensor
    a: dict[torch.dtype, Tensor]
    b: dict[torch.dtype, Tensor]
    c: Tensor
    narrow: dict[torch.dtype, tuple[Tensor, Tensor]]
    whole: tuple[Tensor, Tensor]

    def to(self, device: str) -> Inputs:
        """The same inputs on a device."""
        return Inputs(**{field.name: _moved(getattr(self, field.name), device) for field in fields(self)})


@dataclass
class Operation:
    """One operation.

    Parameters
    ----------
    claim : the row of the table that it belongs to.
    name : what it is.
    run : inputs to result.
    same : whether CPU and GPU must give the same bits.
    """

    claim: str
    name: str
    run: Callable[[Inputs], Tensor]
    same: bool = True


def inputs(seed: int) -> Inputs:
    """Random inputs: integers of their whole range, floats of all exponents, subnormals and both zeros."""
    g = torch.Generator().manual_seed(seed)

    def integers(dtype: torch.dtype) -> Tensor:
        info = torch.iinfo(dtype)
        return torch.randint(info.min, info.max, (COUNT,), dtype=dtype, generator=g)

    def floats(dtype: torch.dtype) -> Tensor:
        """Any finite bit pattern of a type."""
        storage = {2: torch.int16, 4: torch.int32, 8: torch.int64}[torch.finfo(dtype).bits // 8]
        values = integers(storage).view(dtype)
        return torch.where(values.isfinite(), values, torch.zeros_like(values))

    narrow_types = (torch.bfloat16, torch.float16)
    whole = tuple(torch.randint(-1000, 1000, (64, 64), generator=g).double() for _ in range(2))
    eights = tuple(torch.randn(COUNT, generator=g).clamp(-100, 100).to(torch.float8_e4m3fn) for _ in range(2))
    return Inputs(
        first={dtype: integers(dtype) for dtype in INTEGERS},
        second={dtype: integers(dtype) for dtype in INTEGERS},
        shift=torch.randint(0, 63, (COUNT,), generator=g),
        index=torch.randint(0, COUNT, (COUNT,), generator=g),
        positive=torch.randint(1 << 30, 1 << 31, (COUNT,), generator=g),
        a={dtype: floats(dtype) for dtype in FLOATS},
        b={dtype: floats(dtype) for dtype in FLOATS},
        c=torch.randn(COUNT, generator=g),
        narrow={
            **{t: (torch.randn(COUNT, generator=g).to(t), floats(t)) for t in narrow_types},
            torch.float8_e4m3fn: (eights[0], eights[1]),
        },
        whole=(whole[0], whole[1]),
    )


def operations() -> Iterator[Operation]:
    """All of them, claim by claim."""
    yield from _integer_operations()
    yield from _reference_operations()
    yield from _exact_float_operations()
    yield from _operations_without_a_promise()


def _integer_operations() -> Iterator[Operation]:
    claim = "integers: add, multiply, shift, and, or, compare, where, gather, index_select, cat, arange"
    for dtype in INTEGERS:
        two: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
            "add": torch.add,
            "sub": torch.sub,
            "mul": torch.mul,
            "and": torch.bitwise_and,
            "or": torch.bitwise_or,
            "xor": torch.bitwise_xor,
            "less": torch.lt,
            "equal": torch.eq,
            "where": lambda x, y: torch.where(x > y, x, y),
            "cat": lambda x, y: torch.cat([x, y]),
            "maximum": torch.maximum,
        }
        for name, function in two.items():
            yield Operation(claim, f"{name} {dtype}", _of_integers(function, dtype))
        bits = torch.iinfo(dtype).bits
        yield Operation(claim, f"shift left {dtype}", _shifted(torch.bitwise_left_shift, dtype, bits))
        yield Operation(claim, f"shift right {dtype}", _shifted(torch.bitwise_right_shift, dtype, bits))
    yield Operation(claim, "gather", lambda x: x.first[torch.int64].gather(0, x.index))
    yield Operation(claim, "index_select", lambda x: x.first[torch.int64].index_select(0, x.index))
    yield Operation(claim, "arange", lambda x: torch.arange(-50, 1000, 7, device=x.index.device))
    claim = "integer sum, amax, amin, and (a * b).sum()"
    for dtype in INTEGERS:
        yield Operation(claim, f"sum {dtype}", _of_integers(lambda x, y: x.view(64, -1).sum(1), dtype))
        yield Operation(claim, f"amax {dtype}", _of_integers(lambda x, y: x.view(64, -1).amax(0), dtype))
        yield Operation(claim, f"amin {dtype}", _of_integers(lambda x, y: x.view(64, -1).amin(1), dtype))
        yield Operation(claim, f"dot {dtype}", _of_integers(lambda x, y: (x * y).sum(), dtype))


def _reference_operations() -> Iterator[Operation]:
    claim = (
        "what else the reference uses: clamp, floor division, bucketize, repeat_interleave, stable sort, "
        "scatter, reinterpretation"
    )
    yield Operation(claim, "clamp", lambda x: x.first[torch.int64].clamp(-(1 << 20), 1 << 40))
    yield Operation(
        claim,
        "floor division",
        lambda x: torch.full_like(x.positive, 1 << 61).div(x.positive, rounding_mode="floor"),
    )
    yield Operation(
        claim,
        "bucketize",
        lambda x: torch.bucketize(
            x.positive >> (x.shift % 32),
            torch.tensor([1 << bit for bit in range(63)], device=x.shift.device),
            right=True,
        ),
    )
    yield Operation(claim, "repeat_interleave", lambda x: x.shift.view(256, -1).repeat_interleave(3, dim=0))
    yield Operation(
        claim,
        "stable sort",
        lambda x: x.shift.view(64, -1).sort(dim=-1, descending=True, stable=True).indices,
    )
    yield Operation(claim, "scatter", lambda x: torch.zeros_like(x.shift).scatter(0, x.index, 1))
    yield Operation(claim, "pad", lambda x: torch.nn.functional.pad(x.shift.view(64, -1), (3, 5)))
    yield Operation(claim, "bits of float64", lambda x: x.a[torch.float64].view(torch.int64) >> 52)
    yield Operation(claim, "masked_fill", lambda x: x.shift.masked_fill(x.index > 1000, -5))
    yield Operation(claim, "any", lambda x: (x.shift.view(64, -1) > 61).any(1))
    yield Operation(
        claim, "narrowing to int32 and back", lambda x: x.first[torch.int64].to(torch.int32).to(torch.int64)
    )
    yield Operation(claim, "bits of float32", lambda x: x.a[torch.float32].view(torch.int32).to(torch.int64))
    yield Operation(
        claim, "int32 as float32", lambda x: x.a[torch.float32].view(torch.int32).view(torch.float32)
    )


def _exact_float_operations() -> Iterator[Operation]:
    claim = "float32 and float64: one add, sub or mul"
    for dtype in FLOATS:
        yield Operation(claim, f"add {dtype}", _of_floats(torch.add, dtype))
        yield Operation(claim, f"sub {dtype}", _of_floats(torch.sub, dtype))
        yield Operation(claim, f"mul {dtype}", _of_floats(torch.mul, dtype))
    claim = "tensor / tensor and sqrt"
    for dtype in FLOATS:
        yield Operation(claim, f"div {dtype}", _of_floats(lambda a, b: _canonical(a / b), dtype))
        yield Operation(claim, f"sqrt {dtype}", _of_floats(lambda a, b: a.abs().sqrt(), dtype))
    claim = "products of narrow floats and an addition, in float32"
    for dtype in (torch.bfloat16, torch.float16, torch.float8_e4m3fn):
        yield Operation(claim, f"a * b + c {dtype}", _product_and_sum(dtype))
    claim = "matmul of whole numbers with small sums"
    yield Operation(claim, "float64", lambda x: x.whole[0] @ x.whole[1])
    yield Operation(claim, "float32", lambda x: (x.whole[0] % 100).float() @ (x.whole[1] % 100).float())
    claim = "casts from float32"
    yield Operation(claim, "to bfloat16", lambda x: x.a[torch.float32].to(torch.bfloat16))
    yield Operation(claim, "to float16", lambda x: x.a[torch.float32].to(torch.float16))
    yield Operation(claim, "bfloat16 to float32", lambda x: x.narrow[torch.bfloat16][1].float())
    yield Operation(claim, "float16 to float32", lambda x: x.narrow[torch.float16][1].float())
    claim = "maximum and minimum, zeros apart"
    for dtype in FLOATS:
        yield Operation(claim, f"maximum {dtype}", _of_floats(lambda a, b: torch.maximum(a, b) + 0.0, dtype))
        yield Operation(claim, f"amin {dtype}", _of_floats(lambda a, b: a.view(64, -1).amin(1) + 0.0, dtype))
    claim = "floor, round, trunc, abs, neg, multiplication by a power of two"
    for name in ("floor", "round", "trunc", "abs", "neg"):
        for dtype in FLOATS:
            yield Operation(claim, f"{name} {dtype}", _of_floats(_unary(name), dtype))
    for dtype in FLOATS:
        yield Operation(claim, f"times 2^-7 {dtype}", _of_floats(lambda a, b: a * 2.0**-7, dtype))


def _operations_without_a_promise() -> Iterator[Operation]:
    claim = "no promise: transcendental functions"
    for name in ("exp", "exp2", "log", "tanh", "sigmoid", "rsqrt"):
        yield Operation(claim, name, _of_c(_unary(name)), same=False)
    yield Operation(claim, "softmax", lambda x: x.c.view(64, -1).softmax(1), same=False)
    yield Operation(claim, "pow", lambda x: x.c.abs().pow(1.7), same=False)
    claim = "no promise: float reductions"
    for name in ("sum", "mean", "var", "norm"):
        yield Operation(claim, name, _of_c(_unary(name)), same=False)
    yield Operation(claim, "cumsum", lambda x: x.c.cumsum(0), same=False)
    yield Operation(claim, "logsumexp", lambda x: x.c.view(64, -1).logsumexp(1), same=False)
    yield Operation(claim, "matmul", lambda x: x.c.view(256, -1) @ x.c.view(256, -1).T, same=False)
    yield Operation(
        claim, "einsum", lambda x: torch.einsum("ij,kj->ik", x.c.view(256, -1), x.c.view(256, -1)), same=False
    )
    claim = "no promise: fused or rewritten by the GPU"
    yield Operation(claim, "addcmul", lambda x: torch.addcmul(-x.c * x.c, x.c, x.c), same=False)
    yield Operation(claim, "addcdiv", lambda x: torch.addcdiv(x.c, x.c.roll(1), x.c.roll(2)), same=False)
    yield Operation(claim, "lerp", lambda x: torch.lerp(x.c, x.c.roll(1), 0.3), same=False)
    yield Operation(claim, "add with alpha", lambda x: torch.add(x.c, x.c.roll(1), alpha=0.3), same=False)
    yield Operation(
        claim,
        "baddbmm",
        lambda x: torch.baddbmm(x.c.view(16, 64, 64), x.c.view(16, 64, 64), x.c.view(16, 64, 64)),
        same=False,
    )
    yield Operation(claim, "tensor / number", lambda x: x.c / 3.0, same=False)


def same_bits(first: Tensor, second: Tensor) -> bool:
    """Whether two results on one device have the same type, shape and bits."""
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    if first.is_floating_point():
        storage = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[first.element_size()]
        first, second = first.contiguous().view(storage), second.contiguous().view(storage)
    return torch.equal(first, second)


def _moved(item: object, device: str) -> object:
    if isinstance(item, Tensor):
        return item.to(device)
    if isinstance(item, tuple):
        return tuple(_moved(part, device) for part in item)
    assert isinstance(item, dict)
    return {key: _moved(part, device) for key, part in item.items()}


def _unary(name: str) -> Callable[..., Tensor]:
    return lambda a, *_: getattr(torch, name)(a)


def _canonical(values: Tensor) -> Tensor:
    """Values with one NaN, whose payload nobody promises."""
    return values.masked_fill(values.isnan(), float("nan"))


def _of_integers(
    function: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype
) -> Callable[[Inputs], Tensor]:
    return lambda x: function(x.first[dtype], x.second[dtype])


def _of_floats(
    function: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype
) -> Callable[[Inputs], Tensor]:
    return lambda x: _canonical(function(x.a[dtype], x.b[dtype]))


def _of_c(function: Callable[..., Tensor]) -> Callable[[Inputs], Tensor]:
    return lambda x: _canonical(function(x.c))


def _shifted(
    function: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype, bits: int
) -> Callable[[Inputs], Tensor]:
    return lambda x: function(x.first[dtype], (x.shift % bits).to(dtype))


def _product_and_sum(dtype: torch.dtype) -> Callable[[Inputs], Tensor]:
    return lambda x: x.narrow[dtype][0].float() * x.narrow[dtype][1].float() + x.c
