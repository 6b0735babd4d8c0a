"""The PTX instructions that `ptx_machine.py` knows, each made into a Python function of a warp.

Those that compute are in `ptx_compute.py`, wgmma is in `ptx_wgmma.py`, and memory and synchronisation are here.
"""

import numpy as np

from tests.lowering import ptx_wgmma
from tests.lowering.ptx_compute import LANE, LANES, WIDTHS, Computing
from tests.lowering.ptx_machine import Barrier


class Compiled(Computing):
    """A program as a list of functions of a warp."""

    # Memory.

    def _ld(self, s, o):
        if "param" in s:
            index, store = self.parameters.index(o[1].strip("[]")), self.target(o[0])
            return lambda w: store(w, np.full(LANES, w.block.parameters[index], np.uint64))
        targets, at = [self.target(x) for x in self.names(o[0])], self.address(o[1])
        names, size = self.names(o[0]), int(s[-1][1:]) // 8
        wide = [WIDTHS[self.program.kind_of(n)[1:]] for n in names]
        shared = "shared" in s

        def run(w):
            lanes = w.lanes()
            read = w.block.read_shared if shared else w.block.memory.read
            raw = np.ascontiguousarray(read(at(w)[lanes], size * len(names)))
            for i, (store, kind) in enumerate(zip(targets, wide, strict=True)):
                part = np.ascontiguousarray(raw[:, i * size : (i + 1) * size])
                value = part.view(np.int8 if s[-1] == "s8" else f"u{size}")[:, 0].astype(kind)
                full = np.zeros(LANES, kind)
                full[lanes] = value
                store(w, full)

        return run

    def _st(self, s, o):
        at, size = self.address(o[0]), int(s[-1][1:]) // 8
        gets, shared = [self.source(x) for x in self.names(o[1])], "shared" in s

        def run(w):
            lanes = w.lanes()
            parts = [get(w)[lanes].astype(f"u{size}").view(np.uint8).reshape(-1, size) for get in gets]
            write = w.block.write_shared if shared else w.block.memory.write
            write(at(w)[lanes], np.concatenate(parts, axis=1))

        return run

    def _prefetch(self, s, o):
        return lambda w: None

    def _ldmatrix(self, s, o):
        assert "x4" in s and "trans" not in s
        targets, at = [self.target(x) for x in self.names(o[0])], self.address(o[1])

        def run(w):
            rows = w.block.read_shared(at(w), 16)  # 8 rows of each of 4 matrices
            for i, store in enumerate(targets):
                store(w, rows[8 * i : 8 * i + 8].reshape(-1).view(np.uint32).copy())

        return run

    def _stmatrix(self, s, o):
        assert "x4" in s and "trans" not in s
        at, gets = self.address(o[0]), [self.source(x) for x in self.names(o[1])]

        def run(w):
            rows = [get(w).copy().view(np.uint8).reshape(8, 16) for get in gets]
            w.block.write_shared(at(w), np.concatenate(rows))

        return run

    def _cp(self, s, o):
        assert s[0] == "async"
        if "commit_group" in s:

            def commit(w):
                w.groups.append(w.copies)
                w.copies = []

            return commit
        if "wait_group" in s or "wait_all" in s:
            keep = int(o[0]) if o else 0

            def wait(w):
                if not o:
                    w.groups.append(w.copies)
                    w.copies = []
                done = w.groups[: len(w.groups) - keep]
                w.groups = w.groups[len(done) :]
                for copy in (c for group in done for c in group):
                    copy.land()

            return wait
        if "mbarrier" in s:
            return self._arrive_when_copied(o[0])
        to, of, size = self.address(o[0]), self.address(o[1]), self.source(o[3])

        def start(w):
            copy = _Copy(w.block, w.lanes(), to(w), of(w), size(w))
            w.copies.append(copy)
            if not w.block.lazy:
                copy.land()

        return start

    def _arrive_when_copied(self, address):
        at = self.address(address)

        def run(w):
            copies = [c for group in w.groups for c in group] + list(w.copies)
            barrier, count = w.block.barriers[int(at(w)[0])], int(w.lanes().sum())

            def land():
                for copy in copies:
                    copy.land()
                barrier.arrive(count)

            w.block.landing.append(land) if w.block.lazy else land()

        return run

    # Synchronisation.

    def _mbarrier(self, s, o):
        if s[0] == "init":
            at, count = self.address(o[0]), int(o[1])

            def init(w):
                (address,) = np.unique(at(w)[w.lanes()])
                w.block.barriers[int(address)] = Barrier(count)

            return init
        if s[0] == "arrive":
            at, count = self.address(o[1]), int(o[2]) if len(o) > 2 else 1

            def arrive(w):
                for address in at(w)[w.lanes()]:
                    w.block.barriers[int(address)].arrive(count)

            return arrive
        assert s[:2] == ["try_wait", "parity"]
        store, at, parity = self.target(o[0]), self.address(o[1]), self.source(o[2])

        def test(w):
            (address,), (wanted,) = np.unique(at(w)[w.lanes()]), np.unique(parity(w)[w.lanes()])
            passed = w.block.barriers[int(address)].passed(int(wanted))
            store(w, np.full(LANES, passed))
            if not passed:
                w.spins = True

        return test

    def _bar(self, s, o):
        if s[0] == "warp":
            return lambda w: w.meet(("bar",), lambda parts: None)
        count = int(o[1]) // LANES if len(o) > 1 else self.threads // LANES
        name = self.source(o[0])
        return lambda w: w.block.meet(w, int(name(w)[0]), count)

    def _fence(self, s, o):
        return lambda w: None

    def _setmaxnreg(self, s, o):
        return _converged

    def _elect(self, s, o):
        value, predicate = o[0].split("|")
        store, flag = self.target(value), self.target(predicate)

        def run(w):
            _converged(w)
            store(w, np.zeros(LANES, np.uint32))
            flag(w, LANE == 0)

        return run

    def _shfl(self, s, o):
        mode, store, get, by = s[1], self.target(o[0]), self.source(o[1]), self.source(o[2])
        assert mode in ("bfly", "idx")

        def run(w):
            _converged(w)
            other = LANE ^ by(w) if mode == "bfly" else by(w) % LANES
            store(w, get(w)[other])

        return run

    def _vote(self, s, o):
        (file, row), get = self.register(o[0]), self.source(o[1])

        def run(w):
            w.part.vote = get(w) & w.part.mask, getattr(w, file)[row]
            w.meet(("vote",), count)

        def count(parts):
            said = np.logical_or.reduce([part.vote[0] for part in parts])
            bits = np.uint32(np.sum(said.astype(np.uint64) << LANE.astype(np.uint64)))
            for part in parts:
                part.vote[1][part.mask] = bits

        return run

    def _wgmma(self, s, o):
        if s[0] == "fence":
            return _converged
        if s[0] == "commit_group":
            return ptx_wgmma.commit
        if s[0] == "wait_group":
            return lambda w: ptx_wgmma.wait(w, int(o[0]))
        return ptx_wgmma.multiply(self, s, o)

    def _ret(self, s, o):
        def run(w):
            assert w.mask is None
            w.done = True

        return run


class _Copy:
    """16 bytes of each lane on their way from global to shared memory; 0 bytes read are 16 bytes of zeros."""

    def __init__(self, block, lanes, to, of, sizes):
        self.block, self.to, self.of, self.sizes = block, to[lanes], of[lanes], sizes[lanes]
        self.landed = False

    def land(self):
        if self.landed:
            return
        self.landed = True
        real = self.sizes > 0
        data = np.zeros((len(real), 16), np.uint8)
        if real.any():
            data[real] = self.block.memory.read(self.of[real], 16)
        self.block.write_shared(self.to, data)


def _converged(w):
    where = f"instruction {w.pc - 1}, {w.block.compiled.program.code[w.pc - 1]}, others at {[p.pc for p in w.others]}"
    assert w.mask is None, f"a part of warp {w.index} at an instruction for whole warps: {where}"
