"""Runs the PTX of a Mosaic kernel on the CPU: warps of a block side by side, with shared memory, barriers and wgmma.

What no GPU has run can so be run at all: the kernel's own code after Pallas, Mosaic and LLVM, with its address
arithmetic, swizzles, descriptors and barriers. It knows the instructions of the sparse MLA kernels (`ptx_ops.py`), and
what is asynchronous is as late as the rules allow, or at once: a copy lands, and a wgmma reads shared memory, when
somebody waits for it. Warps take turns at random. Fences do nothing, and time is not modelled.
"""

import re

import numpy as np

LANES = 32
POISON = 0xFF  # what shared memory holds at first: NaN in bf16 and e4m3, -1 as an integer


class Deadlock(RuntimeError):
    """No warp can go on."""


class Program:
    """Instructions of the one kernel in a PTX text, and what registers and parameters it names."""

    def __init__(self, ptx: str):
        self.text = ptx
        body = ptx[ptx.index(".visible .entry") :]
        self.parameters = re.findall(r"\.param \.u64 .*?(\w+_param_\d+)", body)
        self.threads = int(re.search(r"\.maxntid (\d+)", body)[1])
        self.code: list[tuple[str | None, str, list[str]]] = []  # predicate, opcode, operands
        self.labels: dict[str, int] = {}
        self.kinds: dict[str, str] = {}
        for statement in self._statements(body[body.index("\n{") + 2 :]):
            self._add(statement)
        self.joins = _joins(self.code, self.labels)

    @staticmethod
    def _statements(body: str):
        for line in re.sub(r"//[^\n]*", "", body).split(";"):
            text = re.sub(r"\s*\n\s*", " ", line).strip()
            text = re.sub(r"\.(loc|file)\s+\d+[^;]*?(?=(\$L|[a-z@{}.]|$))", " ", text)
            yield text.strip()

    def _add(self, text: str):
        while True:
            text = text.strip()
            label = re.match(r"(\$?\w+):", text)
            if label:
                self.labels[label[1]] = len(self.code)
                text = text[label.end() :]
            elif text[:1] in ("{", "}"):
                text = text[1:]
            else:
                break
        if text.startswith(".reg"):
            kind = text.split()[1]
            for name in text.split(None, 2)[2].split(","):
                self.kinds[name.strip().split("<")[0]] = kind[1:]
            return
        if not text or text.startswith((".shared", ".pragma", ".section")):
            return
        found = re.match(r"(?:@(!?[%\w]+)\s+)?([a-z][\w.:]*)\s*(.*)", text)
        assert found, text
        self.code.append((found[1], found[2], _operands(found[3])))

    def kind_of(self, register: str) -> str:
        """Declared type of a register."""
        return self.kinds.get(register) or self.kinds[re.sub(r"\d+$", "", register)]


def _joins(code, labels) -> dict[int, int]:
    """For each conditional branch the first instruction that every way from it leads to: its post-dominator."""
    branches = {i: labels[ops[0]] for i, (_, op, ops) in enumerate(code) if op.startswith("bra")}
    starts = sorted({0, *branches.values(), *(i + 1 for i in branches)})
    starts = [i for i in starts if i < len(code)]
    block_of = {start: n for n, start in enumerate(starts)}
    end = len(starts)
    follow: list[list[int]] = []
    for n, start in enumerate(starts):
        last = (starts[n + 1] if n + 1 < end else len(code)) - 1
        predicate, op, _ = code[last]
        ways = [block_of[branches[last]]] if last in branches else []
        if last not in branches or predicate:
            ways.append(end if op == "ret" or n + 1 >= end else n + 1)
        follow.append(ways)
        assert start <= last
    after = [set(range(end + 1)) for _ in range(end)] + [{end}]
    changed = True
    while changed:
        changed = False
        for n in reversed(range(end)):
            new = {n} | set.intersection(*(after[way] for way in follow[n]))
            changed, after[n] = changed or new != after[n], new
    joins = {}
    for i in branches:
        if code[i][0]:
            n = max(m for m, start in enumerate(starts) if start <= i)
            # The nearest of those that every way leads to is the one that leads to all the others.
            nearest = max(after[n] - {n}, key=lambda m: len(after[m]))
            joins[i] = starts[nearest] if nearest < end else len(code)
    return joins


def _operands(text: str) -> list[str]:
    parts = re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,{}\[\]]+", text)
    return [p.strip() for p in parts if p.strip()]


class Memory:
    """Global memory: arrays at addresses of their own, which nothing may leave."""

    def __init__(self):
        self.arrays: list[np.ndarray] = []

    def place(self, array: np.ndarray) -> int:
        """Address of an array, as bytes."""
        self.arrays.append(np.ascontiguousarray(array).view(np.uint8).reshape(-1))
        return len(self.arrays) << 36

    def read(self, addresses: np.ndarray, size: int) -> np.ndarray:
        """Bytes [lanes, size]."""
        return self._array(addresses, size)[self._offsets(addresses)[:, None] + np.arange(size)]

    def write(self, addresses: np.ndarray, values: np.ndarray):
        """Store bytes [lanes, size]."""
        size = values.shape[1]
        self._array(addresses, size)[self._offsets(addresses)[:, None] + np.arange(size)] = values

    @staticmethod
    def _offsets(addresses):
        return (addresses & np.uint64((1 << 36) - 1)).astype(np.int64)

    def _array(self, addresses, size):
        which = np.unique(addresses >> np.uint64(36))
        assert which.size == 1 and 1 <= which[0] <= len(self.arrays), f"addresses {addresses} are of no one array"
        array, offsets = self.arrays[int(which[0]) - 1], self._offsets(addresses)
        assert offsets.max() + size <= array.size, f"{offsets.max()} + {size} bytes of an array of {array.size}"
        assert (offsets % min(size, 16) == 0).all(), f"{size} bytes at {offsets} are not aligned"
        return array


class Barrier:
    """An mbarrier."""

    def __init__(self, count: int):
        self.count = self.pending = count
        self.phases = 0

    def arrive(self, count: int):
        """Count down; the last arrival of a phase starts the next."""
        self.pending -= count
        assert self.pending >= 0, "more arrivals than the barrier waits for"
        if self.pending == 0:
            self.pending, self.phases = self.count, self.phases + 1

    def passed(self, parity: int) -> bool:
        """Whether the phase of that parity is over."""
        return self.phases % 2 != parity


class Join:
    """Where lanes that have parted meet again."""

    def __init__(self, pc: int, wanted: np.ndarray, outer: "Join | None"):
        self.pc, self.wanted, self.outer = pc, wanted, outer
        self.there = np.zeros(LANES, bool)


class Part:
    """Lanes of a warp that are at the same place."""

    def __init__(self, pc: int, mask: np.ndarray, join: Join | None):
        self.pc, self.mask, self.join = pc, mask, join
        self.meeting: tuple | None = None  # what it waits to do together with the other lanes


class Warp:
    """Registers of 32 lanes, and the parts they have fallen into; `mask` is None where that is one."""

    def __init__(self, block: "Block", index: int):
        self.block, self.index = block, index
        self.warpgroup = block.warpgroups[index // 4]
        sizes = block.compiled.sizes
        self.r = np.zeros((sizes["b32"], LANES), np.uint32)
        self.d = np.zeros((sizes["b64"], LANES), np.uint64)
        self.h = np.zeros((sizes["b16"], LANES), np.uint16)
        self.p = np.zeros((sizes["pred"], LANES), bool)
        self.part = Part(0, np.ones(LANES, bool), None)
        self.others: list[Part] = []
        self.mask: np.ndarray | None = None
        self.blocked = self.done = self.spins = False
        self.copies: list = []  # asked for and not committed
        self.groups: list[list] = []
        self.executed = 0

    @property
    def pc(self) -> int:
        """The next instruction."""
        return self.part.pc

    def lanes(self) -> np.ndarray:
        """Mask of the active lanes."""
        return self.part.mask if self.mask is None else self.mask

    def _switch(self, part: Part):
        self.part, self.mask = part, None if part.mask.all() else part.mask

    def branch(self, target: int, taken: np.ndarray):
        """Go to `target` with the lanes that take it; all meet where every way leads."""
        part = self.part
        taken = taken & part.mask
        if (taken == part.mask).all():
            part.pc = target
        elif taken.any():
            join = Join(self.block.compiled.program.joins[part.pc - 1], part.mask, part.join)
            self.others.append(Part(target, taken, join))
            self._switch(Part(part.pc, part.mask & ~taken, join))

    def _arrive(self):
        """Join the lanes that wait where these have arrived; else go on with others."""
        while (join := self.part.join) and join.pc == self.part.pc:
            join.there |= self.part.mask
            if (join.there == join.wanted).all():
                self._switch(Part(join.pc, join.wanted, join.outer))
            else:
                self._switch(self.others.pop())

    def meet(self, key: tuple, action):
        """Call `action(parts)` once all lanes are at an instruction of this kind, in one place or in several.

        Compilers may put an instruction for the whole warp on both sides of a branch.
        """
        if self.mask is None:
            action([self.part])
            return
        self.part.meeting = key
        waiting = [self.part, *(p for p in self.others if p.meeting == key)]
        if sum(p.mask.sum() for p in waiting) == LANES:
            for part in waiting:
                part.meeting = None
            action(waiting)
            return
        free = [p for p in self.others if p.meeting is None]
        assert free, f"lanes of warp {self.index} wait for each other at {key}"
        self.others.append(self.part)
        self.others.remove(free[-1])
        self._switch(free[-1])

    def run(self, steps: int):
        """Execute until blocked, done, out of steps, or at a barrier that is not open."""
        code = self.block.compiled.code
        self.spins = False
        for _ in range(steps):
            if self.mask is not None:
                self._arrive()
            at = self.part.pc
            self.part.pc = at + 1
            code[at](self)
            self.executed += 1
            if self.blocked or self.done or self.spins:
                return


class Warpgroup:
    """What four warps share: the wgmma that are under way."""

    def __init__(self):
        self.waiting: list[Warp] = []
        self.issued: list = []  # not committed
        self.groups: list[list] = []


class Block:
    """One block of the grid."""

    def __init__(self, compiled, memory: Memory, index: int, parameters: list[int], rng, lazy: bool):
        self.compiled, self.memory, self.index, self.parameters = compiled, memory, index, parameters
        self.rng, self.lazy = rng, lazy
        self.shared = np.full(compiled.shared_bytes, POISON, np.uint8)
        self.barriers: dict[int, Barrier] = {}
        self.named: dict[int, list[Warp]] = {}
        warps = compiled.threads // LANES
        self.warpgroups = [Warpgroup() for _ in range(warps // 4)]
        self.warps = [Warp(self, i) for i in range(warps)]
        self.landing: list = []  # what happens on its own at some time

    def run(self, turns: int = 1_000_000):
        """Run all warps to their end."""
        idle = 0  # turns in a row that did nothing but look at a barrier
        for _ in range(turns):
            ready = [w for w in self.warps if not (w.blocked or w.done)]
            if not ready and all(w.done for w in self.warps):
                return
            stuck = not ready or idle > 20 * len(self.warps)
            if self.landing and (stuck or self.rng.random() < 0.02):
                self.landing.pop(0)()
                idle = 0
            elif stuck:
                places = {w.index: w.pc for w in self.warps if not w.done}
                phases = [(self.barriers[a].phases, self.barriers[a].pending) for a in sorted(self.barriers)]
                raise Deadlock(f"no warp can go on; their instructions: {places}; phases, pending: {phases}")
            else:
                warp = ready[self.rng.integers(len(ready))]
                before = warp.executed
                warp.run(int(self.rng.integers(1, 400)))
                idle = idle + 1 if warp.spins and warp.executed - before <= 4 else 0
        raise Deadlock("out of turns")

    def read_shared(self, addresses: np.ndarray, size: int) -> np.ndarray:
        """Bytes [n, size]."""
        assert (addresses % size == 0).all(), f"{size} bytes at {addresses} are not aligned"
        return self.shared[addresses.astype(np.int64)[:, None] + np.arange(size)]

    def write_shared(self, addresses: np.ndarray, values: np.ndarray):
        """Store bytes [n, size]."""
        size = values.shape[1]
        assert (addresses % size == 0).all(), f"{size} bytes at {addresses} are not aligned"
        self.shared[addresses.astype(np.int64)[:, None] + np.arange(size)] = values

    def meet(self, warp: Warp, name: int, count: int):
        """`bar.sync`: block the warp until `count` warps are there."""
        assert warp.mask is None, "a part of a warp at a barrier"
        there = self.named.setdefault(name, [])
        there.append(warp)
        warp.blocked = True
        if len(there) == count:
            for other in there:
                other.blocked = False
            self.named[name] = []


def run_kernel(compiled, grid: int, arrays, order, *, seed=0, lazy=True) -> dict[str, np.ndarray]:
    """Run a kernel; gives all its arrays as it leaves them.

    Args:
      compiled: `ptx_ops.Compiled`.
      grid: Blocks.
      arrays: Inputs by name, and (shape, dtype) for outputs, which start as POISON bytes.
      order: Names in the order of the kernel's parameters: Mosaic has them as the body first uses them.
      seed: Of the order in which warps take turns.
      lazy: Whether what is asynchronous happens as late as it may, or at once.
    """
    assert len(order) == len(compiled.parameters), (order, compiled.parameters)
    memory, rng = Memory(), np.random.default_rng(seed)
    types = {}
    parameters = []
    for name in order:
        x = arrays[name]
        if isinstance(x, tuple):
            shape, dtype = x
            x = np.full((*shape, np.dtype(dtype).itemsize), POISON, np.uint8).view(dtype).reshape(shape)
        types[name] = x.shape, x.dtype
        parameters.append(memory.place(x))
    for index in range(grid):
        Block(compiled, memory, index, parameters, rng, lazy).run()
    return {
        name: raw.view(dtype).reshape(shape)
        for raw, (name, (shape, dtype)) in zip(memory.arrays, types.items(), strict=True)
    }
