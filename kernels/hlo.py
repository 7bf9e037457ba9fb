"""What a compiled program does on a device, read from its optimised HLO: products, memory traffic, collectives.

XLA's own analysis counts a loop's body once, and gives none for a GPU that is not there.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple, TypeAlias

from kernels.topology import Chip

COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")

# What moves no data of its own: names for it, or what its own computations are counted for.
_FREE = frozenset(
    ["parameter", "constant", "tuple", "get-tuple-element", "bitcast", "iota", "partition-id", "replica-id"]
)
_FREE |= {"while", "conditional", "call", "async", "after-all", "opt-barrier"}
_SLICES = frozenset(["slice", "dynamic-slice", "gather"])
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}  # of operand 0, in place; which operand is written
_WIDTHS = {"pred": 8, "token": 0, "opaque": 0}  # bits; the others' names end in theirs
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%([\w.\-]+) = (.*)$")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")


@dataclasses.dataclass
class Work:
    """One device's work.

    flops: of matrix products, two a multiply-add, by the operands' dtype. bytes: read and written in its memory.
    counts: how often each kind of collective runs. moved: the bytes that each kind sends, in rings.
    """

    flops: dict[str, float] = dataclasses.field(default_factory=dict)
    bytes: float = 0.0
    counts: dict[str, int] = dataclasses.field(default_factory=dict)
    moved: dict[str, float] = dataclasses.field(default_factory=dict)


class Roofline(NamedTuple):
    """Seconds that a step takes at least: in products, in memory, between devices, each at the data sheet's speed."""

    compute: float
    memory: float
    collectives: float

    @property
    def overlapped(self) -> float:
        """With all three at once: no step is faster."""
        return max(self)

    @property
    def in_turn(self) -> float:
        """With one after the other."""
        return sum(self)


class _Instruction(NamedTuple):
    """One line of HLO: `name = result opcode(arguments), attributes`; `operands` are the names in the arguments."""

    name: str
    result: str
    opcode: str
    arguments: str
    operands: tuple[str, ...]
    attributes: str
    root: bool


_Computation: TypeAlias = dict[str, _Instruction]


def work(text: str, trips: Mapping[str, int]) -> Work:
    """The work of one run of an optimised HLO module.

    Memory traffic is each kernel's operands and results, of which a slice counts as what it takes and an update in
    place as what it writes; caches are not modelled. Of a conditional all branches count.

    Args:
        trips: how often loops run of which XLA does not know it, by a named scope that they are in.

    Raises:
        ValueError: `text` is no HLO module, or has a loop of which nobody knows how often it runs.
    """
    computations, entry = _parse(text)
    total = Work()
    _run(computations, entry, 1, trips, total)
    return total


def roofline(work: Work, chip: Chip) -> Roofline:
    """The least times of a device's work; products of float32 are taken at TF32's speed, half that of bfloat16."""
    flops = sum(count * (2 if dtype == "f32" else 1) for dtype, count in work.flops.items())
    return Roofline(flops / chip.tensor, work.bytes / chip.bandwidth, sum(work.moved.values()) / chip.link)


def _parse(text: str) -> tuple[dict[str, _Computation], str]:
    computations: dict[str, _Computation] = {}
    current: _Computation = {}
    entry = ""
    for line in text.splitlines():
        if line.startswith(("%", "ENTRY")) and line.endswith("{"):
            name = line.removeprefix("ENTRY ").split(" ", 1)[0].lstrip("%")
            current = computations.setdefault(name, {})
            entry = name if line.startswith("ENTRY") else entry
        elif found := _INSTRUCTION.match(line):
            current[found[2]] = _instruction(found[2], found[3], bool(found[1]))
    if not entry:
        raise ValueError("not an HLO module: it has no ENTRY computation")
    return computations, entry


def _instruction(name: str, rest: str, root: bool) -> _Instruction:
    """Of "TYPE opcode(OPERANDS), ATTRIBUTES"; TYPE may be a tuple of tuples, with comments."""
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.index(" ")
    result, rest = rest[:end], rest[end:].lstrip()
    start = rest.index("(")
    end = _closing(rest, start)
    arguments = rest[start + 1 : end]
    operands = tuple(re.findall(r"%([\w.\-]+)", arguments))
    return _Instruction(name, result, rest[:start], arguments, operands, rest[end + 1 :], root)


def _closing(text: str, start: int) -> int:
    """The place of the bracket that closes the one at `start`."""
    depth = 0
    for place in range(start, len(text)):
        depth += (text[place] == "(") - (text[place] == ")")
        if depth == 0:
            return place
    raise ValueError(f"unbalanced brackets in HLO: {text[:80]}")


def _run(computations: dict[str, _Computation], name: str, times: int, trips: Mapping[str, int], total: Work) -> None:
    """Adds `times` runs of a computation to `total`."""
    computation = computations[name]
    for instruction in computation.values():
        opcode = instruction.opcode.removesuffix("-start")
        if opcode == "while":
            inner = times * _trips(instruction, trips)
            _run(computations, _called(instruction, "body")[0], inner, trips, total)
        elif opcode in ("call", "async", "conditional"):
            for branch in _called(instruction):
                _run(computations, branch, times, trips, total)
        elif opcode in COLLECTIVES:
            _add(total.counts, opcode, times)
            _add(total.moved, opcode, times * _sent(opcode, computation, instruction))
        elif opcode == "fusion":
            for dtype, flops in _products(computations, _called(instruction)[0]):
                _add(total.flops, dtype, times * flops)
        elif opcode == "dot":
            _add(total.flops, *_product(computation, instruction, times))
        if opcode not in _FREE and not opcode.endswith(("-done", "-update")):
            total.bytes += times * _traffic(computations, computation, instruction)


def _trips(loop: _Instruction, trips: Mapping[str, int]) -> int:
    known = re.search(r'known_trip_count":\{"n":"(\d+)"', loop.attributes)
    if known:
        return int(known[1])
    scopes = re.search(r'op_name="([^"]*)"', loop.attributes)
    words = re.findall(r"\w+", scopes[1]) if scopes else []
    for scope, count in trips.items():
        if scope in words:
            return count
    raise ValueError(f"how often the loop {loop.name} runs is not known; its scopes are {' '.join(words) or 'none'}")


def _add(counts: dict, key: str, amount: float) -> None:
    counts[key] = counts.get(key, 0) + amount


def _called(instruction: _Instruction, key: str = r"(?:calls|to_apply|\w+_computations?)") -> list[str]:
    found = re.search(rf"\b{key}=(\{{[^}}]*\}}|%[\w.\-]+)", instruction.attributes)
    if instruction.opcode == "conditional" and "true_computation" in instruction.attributes:
        return re.findall(r"(?:true|false)_computation=%([\w.\-]+)", instruction.attributes)
    return re.findall(r"%([\w.\-]+)", found[1]) if found else []


def _products(computations: dict[str, _Computation], name: str) -> Iterable[tuple[str, float]]:
    """Operand dtype and FLOPs of each matrix product in a fusion and what it calls."""
    for instruction in computations[name].values():
        if instruction.opcode == "dot":
            yield _product(computations[name], instruction, 1)
        elif instruction.opcode in ("fusion", "call"):
            for inner in _called(instruction):
                yield from _products(computations, inner)


def _product(computation: _Computation, instruction: _Instruction, times: int) -> tuple[str, float]:
    [(dtype, left)] = _arrays(computation[instruction.operands[0]].result)
    contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.attributes)
    inner = math.prod(left[int(axis)] for axis in contracted[1].split(",") if axis) if contracted else 1
    [(_, out)] = _arrays(instruction.result)
    return dtype, 2.0 * times * inner * math.prod(out)


def _sent(opcode: str, computation: _Computation, instruction: _Instruction) -> float:
    """Bytes that a device sends, in a ring of its group."""
    size = sum(_size(computation[name].result) for name in instruction.operands)
    ways = _group(instruction.attributes)
    if opcode == "collective-permute":
        return size
    if opcode == "all-gather":
        return size * (ways - 1)
    return size * (ways - 1) / ways * (2 if opcode == "all-reduce" else 1)


def _group(attributes: str) -> int:
    """How many devices take part in one group of a collective, as its `replica_groups` say."""
    if mesh := re.search(r"replica_groups=mesh\[([^\]]*)\](?:[^{]*)\{([^}]*)\}", attributes):
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh[1])}
        axes = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", mesh[2])
        return math.prod(int(part) if part else sizes[name] for name, part in axes)
    if tiled := re.search(r"replica_groups=\[(\d+),(\d+)\]", attributes):
        return int(tiled[2])
    if listed := re.search(r"replica_groups=\{\{([\d,]*)\}", attributes):
        return listed[1].count(",") + 1
    return 1


def _traffic(computations: dict[str, _Computation], computation: _Computation, instruction: _Instruction) -> float:
    """Bytes that one kernel reads and writes."""
    opcode = instruction.opcode.removesuffix("-start")
    sizes = [_size(computation[name].result) for name in instruction.operands]
    if opcode == "fusion":
        return _fused_traffic(computations[_called(instruction)[0]], sizes)
    if opcode in _UPDATES:
        return 2 * sizes[_UPDATES[opcode]]
    if opcode in _SLICES:
        return 2 * _size(instruction.result)
    if opcode in COLLECTIVES:
        ways = _group(instruction.attributes)
        return sum(sizes) * (1 + {"all-gather": ways, "reduce-scatter": 1 / ways}.get(opcode, 1))
    return sum(sizes) + _size(instruction.result)


def _fused_traffic(fused: _Computation, sizes: list[int]) -> float:
    """Bytes of a fusion with operands of these sizes."""
    users: dict[str, list[_Instruction]] = {}
    for instruction in fused.values():
        for name in instruction.operands:
            users.setdefault(name, []).append(instruction)

    def taken(name: str) -> float:
        parts = 0.0
        for user in users.get(name, ()):
            first = user.operands[0] == name
            if user.opcode == "bitcast":
                parts += taken(user.name)
            elif user.opcode in _SLICES and first:
                parts += _size(user.result)
            elif user.opcode not in _UPDATES or not first:
                return math.inf
        return parts

    def written(instruction: _Instruction) -> float:
        if instruction.opcode in ("bitcast", "tuple"):
            return sum(written(fused[name]) for name in instruction.operands)
        if instruction.opcode in _UPDATES:
            return _size(fused[instruction.operands[_UPDATES[instruction.opcode]]].result)
        return _size(instruction.result)

    parameters = [x for x in fused.values() if x.opcode == "parameter"]
    read = sum(min(sizes[int(x.arguments)], taken(x.name)) for x in parameters)
    return read + sum(written(x) for x in fused.values() if x.root)


def _size(result: str) -> int:
    """Bytes of an instruction's result."""
    return sum(_width(dtype) * math.prod(dims) // 8 for dtype, dims in _arrays(result))


def _arrays(result: str) -> list[tuple[str, tuple[int, ...]]]:
    """Dtype and dimensions of each array in a type such as "(f32[2,3]{1,0}, s32[])"."""
    return [(dtype, tuple(int(dim) for dim in dims.split(",") if dim)) for dtype, dims in _ARRAY.findall(result)]


@functools.cache
def _width(dtype: str) -> int:
    """Bits of an element: "bf16" has 16, "f8e4m3fn" 8."""
    found = re.search(r"\d+", dtype)
    return int(found[0]) if found else _WIDTHS[dtype]
