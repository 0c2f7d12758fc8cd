#!/usr/bin/env python3
"""Do the reference and the Triton kernel give the same bits on a GPU as the reference on a CPU?

Runs, on the CPU and on a CUDA device: the operations that the reference rests on, the contract's vectors,
and random cases; and the latter two by the kernel of `nearkv.gpu`, which needs Triton (torch's CUDA builds
bring it). It needs python3, numpy and torch 2.11 or newer with CUDA, and this repository's sources;
nothing of it has to be built or installed, and no network is used.

    python3 tools/gpu_check.py                 1 on any difference; 0 and a plain line where there is no GPU
    python3 tools/gpu_check.py --device cpu    self-test: CPU against CPU proves the script and no more; with
                                               TRITON_INTERPRET=1 the kernel is interpreted in it
"""

from __future__ import annotations

import argparse
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from contract_cases import Case

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / part) for part in ("hw", "driver", "tests/conformance", "tools")]

OLDEST_PYTHON = (3, 11)
OLDEST_TORCH = (2, 11)
CASES = 1000
REPORT_EVERY_S = 5.0


def main(arguments: list[str] | None = None) -> int:
    """Run all checks; the exit status."""
    parser = argparse.ArgumentParser(
        description="compare reference and kernel on a GPU with the CPU, bit for bit"
    )
    parser.add_argument(
        "--device", default="cuda", help="cuda, cuda:N, or cpu for a self-test (default cuda)"
    )
    parser.add_argument("--cases", type=int, default=CASES, help=f"random cases (default {CASES})")
    parser.add_argument("--seed", type=int, default=secrets.randbits(32), help="repeat the run of a seed")
    options = parser.parse_args(arguments)
    if sys.version_info < OLDEST_PYTHON:
        print(f"gpu-check did NOT run: Python is {sys.version.split()[0]}, it must be 3.11 or newer")
        return 2
    try:
        import torch
    except ImportError:
        print("gpu-check did NOT run: torch is not installed (pip install torch, 2.11 or newer with CUDA)")
        return 2
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < OLDEST_TORCH:
        print(f"gpu-check did NOT run: torch is {torch.__version__}, it must be 2.11 or newer")
        return 2
    device = torch.device(options.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("gpu-check did NOT run: no CUDA device")
        return 0
    if device.type == "cpu":
        print("gpu-check SELF-TEST: CPU against CPU; this proves that the script works, nothing about a GPU")
        hardware = "cpu"
    else:
        torch.backends.cuda.matmul.allow_tf32 = False
        hardware = torch.cuda.get_device_name(device)
    print(f"torch {torch.__version__}, {hardware}, seed {options.seed}")
    failures = [
        *check_operations(options.device, options.seed),
        *check_vectors(options.device),
        *check_random_cases(options.device, options.seed, options.cases),
        *check_kernel(options.device, options.seed, options.cases // 4),
    ]
    label = "gpu-check SELF-TEST" if device.type == "cpu" else "gpu-check"
    if failures:
        print(f"{label} FAILED: {len(failures)} differences; repeat with --seed {options.seed}")
        return 1
    print(f"{label} passed: every bit on {hardware} equals the CPU's")
    return 0


def check_operations(device: str, seed: int) -> Iterator[str]:
    """Every operation on both; yields what differs and must not."""
    from gpu_operations import inputs, operations, same_bits

    on_cpu = inputs(seed)
    on_device = on_cpu.to(device)
    claim, equal, count = "", 0, 0
    for operation in operations():
        if operation.claim != claim:
            claim = operation.claim
            print(f"operations: {claim}")
        same = same_bits(operation.run(on_cpu), operation.run(on_device).cpu())
        if operation.same:
            equal, count = equal + same, count + 1
            if not same:
                yield _reported(
                    f"operation {operation.name}: the bits differ, and the reference needs them equal"
                )
        else:
            print(f"  {operation.name}: {'equal here' if same else 'differs'}; not used by the reference")
    print(f"operations: {equal} of {count} equal")


def check_vectors(device: str) -> Iterator[str]:
    """The contract's vectors on the device, states and results; yields what differs."""
    from contract_cases import OUTPUTS, result_codes, vectors
    from nearkv.reference import finish
    from nearkv_hw.abi.numerics import TOP_NONE

    def plain(state: object) -> list[list[int | None]]:
        planes = [plane.flatten().tolist() for plane in vars(state).values()]
        return [[None if top == TOP_NONE else top, high, low] for top, high, low in zip(*planes, strict=True)]

    equal, every = 0, vectors()
    for vector in every:
        case = vector.case.to(device)
        partial = case.partial()
        same = partial.query_nan.flatten().tolist() == [vector.query_nan]
        if not vector.query_nan:
            same &= plain(partial.denominator) == [vector.denominator]
        if vector.numerators:  # a vector without rows has no lanes
            same &= vector.query_nan or plain(partial.numerators) == vector.numerators
            for name, dtype in OUTPUTS.items():
                same &= result_codes(finish(partial, dtype, case.v_scale).cpu()) == vector.outputs[name]
        equal += same
        if not same:
            yield _reported(f"vector {case.name!r}: the device does not give the contract's bits")
    print(f"vectors: {equal} of {len(every)} equal")


def check_random_cases(device: str, seed: int, count: int) -> Iterator[str]:
    """Random cases on both: partials and results; yields what differs."""
    import random

    import torch
    from contract_cases import OUTPUTS, Sizes, random_case
    from gpu_operations import same_bits
    from nearkv.reference import finish

    rng = random.Random(seed)
    small = Sizes(batch=2, query_rows=2, kv_heads=2, group=3, rows=40, dim=40)
    large = Sizes(batch=3, query_rows=2, kv_heads=3, group=8, rows=300, dims=(32, 64, 80, 111, 128, 256))

    def same(case: Case) -> bool:
        expected, found = case.partial(), case.to(device)
        partial = found.partial()
        equal = partial.to("cpu").equal(expected)
        for dtype in OUTPUTS.values():
            on_cpu, on_device = (finish(p, dtype, c.v_scale) for p, c in ((expected, case), (partial, found)))
            equal &= same_bits(on_cpu, on_device.to(torch.device("cpu")))
        return equal

    cases = (random_case(rng, large if index % 16 == 0 else small) for index in range(count))
    yield from _unequal("random cases", cases, count, same)


def check_kernel(device: str, seed: int, count: int) -> Iterator[str]:
    """The Triton kernel on the device against the reference on the CPU; yields what differs.

    On a CPU it runs only where Triton interprets.
    """
    import random

    from contract_cases import Sizes, random_case, vectors

    if device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        print("kernel: did NOT run: on a CPU Triton has to interpret (TRITON_INTERPRET=1)")
        return
    try:
        from nearkv.gpu import decode_attention
    except ModuleNotFoundError as error:
        if device != "cpu":
            yield _reported(f"the kernel did not run: {error}")
        else:
            print(f"kernel: did NOT run: {error}")
        return
    rng = random.Random(seed)
    small = Sizes(batch=2, query_rows=2, kv_heads=2, group=3, rows=40, dim=40)
    large = Sizes(batch=3, query_rows=2, kv_heads=3, group=8, rows=2000, dims=(64, 128, 256))
    cases = [vector.case for vector in vectors()]
    large_every = 16 if device != "cpu" else count + 1  # interpreted, one takes minutes
    cases += [random_case(rng, large if index % large_every == 1 else small) for index in range(count)]

    def same(case: Case) -> bool:
        own = case.to(device)
        found = decode_attention(own.q, own.k, own.v, partial=True, **own.options)
        return found.to("cpu").equal(case.partial())

    yield from _unequal("kernel cases", cases, len(cases), same)


def _unequal(what: str, cases: Iterable[Case], count: int, same: Callable[[Case], bool]) -> Iterator[str]:
    """The cases that are not the same, as they are met; tells how far it is, and how many were."""
    equal, spoken = 0, time.monotonic()
    for index, case in enumerate(cases):
        if same(case):
            equal += 1
        else:
            yield _reported(f"{what}, number {index}: {case.describe()}")
        if time.monotonic() - spoken > REPORT_EVERY_S:
            spoken = time.monotonic()
            print(f"{what}: {index + 1} of {count} done, {equal} equal", flush=True)
    print(f"{what}: {equal} of {count} equal")


def _reported(failure: str) -> str:
    print(f"UNEQUAL: {failure}", flush=True)
    return failure


if __name__ == "__main__":
    sys.exit(main())
