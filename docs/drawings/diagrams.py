"""Drawings of what happens where: one step, meshes, slots, packing, resuming, launching."""

import heapq

from svg import Picture

KINDS = "abcd"


def one_step() -> Picture:
    p = Picture(860, 300, "One step: prompts, completions, rewards, advantages, rows, update")
    p.text(24, 32, "One step, from prompts to an update", "big bold")
    top = [
        ("prompts", "16 examples of\nthe data order", "e"),
        ("rollout", "8 completions of\neach prompt, with\nlog-probabilities", "a"),
        ("rewards", "a function says\nhow good each is\n(on the CPU)", "b"),
        ("advantages", "reward compared\nwith its group", "c"),
    ]
    for i, (name, words, kind) in enumerate(top):
        x = 24 + 210 * i
        p.rect(x, 54, 168, 82, kind)
        p.text(x + 84, 74, name, "mid bold")
        for j, row in enumerate(words.split("\n")):
            p.text(x + 84, 93 + 15 * j, row, "mid small")
        if i < 3:
            p.arrow(x + 168, 95, x + 208, 95)
    bottom = [
        ("new weights", "the next step\nsamples with them", "a"),
        ("update", "gradient, clip,\noptimizer", "d"),
        ("loss", "sum over tokens of\nweight x objective", "d"),
        ("rows", "tokens, loss weights\nand advantages,\ndivided over fsdp", "c"),
    ]
    for i, (name, words, kind) in enumerate(bottom):
        x = 24 + 210 * i
        p.rect(x, 182, 168, 82, kind)
        p.text(x + 84, 202, name, "mid bold")
        for j, row in enumerate(words.split("\n")):
            p.text(x + 84, 221 + 15 * j, row, "mid small")
        if i < 3:
            p.arrow(x + 208, 223, x + 170, 223)
    p.arrow(738, 136, 738, 180)
    p.line([(108, 182), (108, 159), (318, 159), (318, 150)], "line dash")
    p.arrow(318, 150, 318, 138)
    p.text(213, 154, "policy", "mid small dim")
    p.text(
        24,
        286,
        "Blue: sampling.  Orange: your function.  Green: host.  Pink: one compiled program.",
        "small dim",
    )
    return p


def _weight(p: Picture, x: float, y: float, held: list[list[bool]], size: float = 15) -> None:
    """A matrix of 4 x 4 tiles: a tile that the device holds is coloured by its row, others empty."""
    for i, row in enumerate(held):
        for j, here in enumerate(row):
            p.rect(x + size * j, y + size * i, size - 1, size - 1, KINDS[i] if here else "grid")


def _mesh(title: str, held: list, sequences: list[str], notes: list[str]) -> Picture:
    p = Picture(860, 262, title)
    p.text(24, 32, title, "big bold")
    for i in range(4):
        x = 24 + 208 * i
        p.rect(x, 48, 188, 118, "soft")
        p.text(x + 12, 68, f"device {i}", "bold")
        p.text(x + 12, 90, "a weight", "small dim")
        _weight(p, x + 12, 98, held[i])
        p.text(x + 92, 90, "sequences", "small dim")
        p.lines(x + 92, 108, sequences[i].split("\n"), "small")
    p.lines(24, 190, notes, "small", 18)
    return p


def _tiles(rows: set[int], columns: set[int]) -> list[list[bool]]:
    return [[i in rows and j in columns for j in range(4)] for i in range(4)]


def mesh_fsdp() -> Picture:
    held = [_tiles({i}, {0, 1, 2, 3}) for i in range(4)]
    return _mesh(
        "fsdp: [[4,1],[fsdp,tp]] divides weights, optimizer and batch",
        held,
        [f"{32 * i} to {32 * i + 31}\nall of their\ntokens" for i in range(4)],
        [
            "Rests on a device: a quarter of every weight and of the optimizer's state.",
            "Moves, layer by layer: the other three quarters (all-gather, forward and backward);",
            "gradients, summed and divided again (reduce-scatter). Once a rollout: the weights, to sample.",
        ],
    )


def mesh_tp() -> Picture:
    held = [_tiles({0, 1, 2, 3}, {i}) for i in range(4)]
    return _mesh(
        "tp: [[1,4],[fsdp,tp]] divides the computation of a sequence",
        held,
        ["0 to 127\n1/4 of heads\nand widths"] * 4,
        [
            "Rests on a device: a quarter of the heads, of the hidden width and of the vocabulary.",
            "Moves, twice a layer: activations, added up over the devices (all-reduce). Weights never move.",
            "That is much traffic for every token, so tp stays inside one machine.",
        ],
    )


def mesh_both() -> Picture:
    held = [_tiles({2 * (i // 2), 2 * (i // 2) + 1}, {2 * (i % 2), 2 * (i % 2) + 1}) for i in range(4)]
    return _mesh(
        "Both: [[2,2],[fsdp,tp]] is two pairs of devices",
        held,
        [f"{64 * (i // 2)} to {64 * (i // 2) + 63}\n1/2 of heads\nand widths" for i in range(4)],
        [
            "Devices 0 and 1 compute the first half of the batch together, devices 2 and 3 the second half.",
            "Inside a pair activations are added up (tp); between the pairs weights are gathered and",
            "gradients added up (fsdp). Each device keeps a quarter of every weight.",
        ],
    )


def mesh_data_parallel() -> Picture:
    held = [_tiles({0, 1, 2, 3}, {0, 1, 2, 3})] * 4
    return _mesh(
        "sharding=data_parallel on [[4,1],[fsdp,tp]]: whole weights everywhere",
        held,
        [f"{32 * i} to {32 * i + 31}\nall of their\ntokens" for i in range(4)],
        [
            "Rests on a device: every weight and the whole state of the optimizer, as in DDP.",
            "Moves, once an update: gradients, added up over all devices (all-reduce). Nothing is gathered.",
            "The same numbers as fsdp, for models that are small beside a device.",
        ],
    )


def _schedule(lengths: list[int], slots: int) -> list[tuple[int, int, int, int]]:
    """(slot, start, end, completion): each slot takes the next completion when its own has ended."""
    free, out = [(0, slot) for slot in range(slots)], []
    for number, length in enumerate(lengths):
        start, slot = heapq.heappop(free)
        out.append((slot, start, start + length, number))
        heapq.heappush(free, (start + length, slot))
    return out


def slots() -> Picture:
    lengths = [9, 3, 5, 14, 4, 7, 3, 6, 12, 2, 5, 4, 8, 3, 6, 5]
    p = Picture(860, 330, "Slots: batches that wait, and slots that are refilled")
    p.text(24, 32, "16 completions in 4 slots; width is length in tokens", "big bold")
    waiting, start = [], 0
    for first in range(0, 16, 4):
        group = lengths[first : first + 4]
        waiting += [(s, start, start + n, first + s) for s, n in enumerate(group)]
        start += max(group)
    refilled = _schedule(lengths, 4)
    for y, name, parts in (
        (66, "a batch waits for its longest", waiting),
        (200, "a free slot takes the next", refilled),
    ):
        end = max(stop for _, _, stop, _ in parts)
        use = sum(lengths) / (4 * end)
        p.text(
            24,
            y - 8,
            f"{name}: {end} decoding steps, {use:.0%} of the places hold a token",
            "small",
        )
        for slot in range(4):
            p.rect(24, y + 26 * slot, 18.0 * end, 22, "soft")
        for slot, begin, stop, number in parts:
            p.rect(
                24 + 18.0 * begin,
                y + 26 * slot,
                18.0 * (stop - begin) - 1.5,
                22,
                KINDS[number // 4],
            )
            p.text(24 + 9.0 * (begin + stop), y + 26 * slot + 15, str(number), "mid small")
    p.text(
        24,
        320,
        "A colour is a prompt: its four completions share one prefilled prompt.",
        "small dim",
    )
    return p


def shared_prompts() -> Picture:
    p = Picture(860, 330, "Packing: rows of one prompt with four completions")
    p.text(24, 32, "One prompt (P) and its four completions, as rows of the update", "big bold")
    unit, prompt, lengths = 13.0, 14, [18, 8, 12, 5]
    widest = prompt + max(lengths)
    computed = {"none": 4 * widest, "sequences": 2 * widest, "prefix": prompt + sum(lengths)}
    y = 66
    p.text(
        24,
        y - 6,
        f"packing=none: every sequence is padded; {computed['none']} tokens computed",
        "small",
    )
    for i, length in enumerate(lengths):
        p.rect(24, y + 19 * i, unit * widest, 16, "soft")
        p.rect(24, y + 19 * i, unit * prompt - 1, 16, "e")
        p.text(24 + unit * prompt / 2, y + 12 + 19 * i, "P", "mid small")
        p.rect(24 + unit * prompt, y + 19 * i, unit * length - 1, 16, KINDS[i])
    y = 176
    together = unit * (2 * prompt + lengths[1] + lengths[3])
    p.text(24, y - 6, "packing=sequences: whole sequences side by side in a row", "small")
    for row, members in enumerate(((0,), (1, 3), (2,))):
        at = 24.0
        p.rect(24, y + 19 * row, max(together, unit * widest), 16, "soft")
        for i in members:
            p.rect(at, y + 19 * row, unit * prompt - 1, 16, "e")
            p.text(at + unit * prompt / 2, y + 12 + 19 * row, "P", "mid small")
            p.rect(at + unit * prompt, y + 19 * row, unit * lengths[i] - 1, 16, KINDS[i])
            at += unit * (prompt + lengths[i])
    y = 264
    p.text(24, y - 6, f"packing=prefix: the prompt once; {computed['prefix']} tokens computed", "small")
    p.rect(24, y, unit * prompt - 1, 16, "e")
    p.text(24 + unit * prompt / 2, y + 12, "P", "mid small")
    at = 24 + unit * prompt
    for i, length in enumerate(lengths):
        p.rect(at, y, unit * length - 1, 16, KINDS[i])
        at += unit * length
    p.text(
        24,
        306,
        "Attention lets a completion see the prompt and itself, and never another completion.",
        "small dim",
    )
    p.text(
        24,
        321,
        "All three give the same gradient: what counts is a weight at each token.",
        "small dim",
    )
    return p


def resuming() -> Picture:
    p = Picture(860, 300, "Resuming: what is read, what is made again, what may change")
    p.text(24, 32, "What resuming restores", "big bold")
    columns = [
        (
            "read from checkpoint",
            "a",
            [
                "weights (or adapters)",
                "state of the optimizer",
                "number of the step",
                "of every file: its digest",
            ],
        ),
        (
            "made from seed and step",
            "c",
            [
                "which examples come next",
                "randomness of every token",
                "learning rate of the step",
                "order of the rows",
            ],
        ),
        (
            "must be the same",
            "b",
            [
                "model and base weights",
                "algorithm, rewards, data",
                "lengths, optimizer settings",
                "precision, seed, batch",
            ],
        ),
        (
            "may change freely",
            "d",
            [
                "mesh, number of devices",
                "micro-batches, packing",
                "training.max_steps",
                "how often things are logged",
            ],
        ),
    ]
    for i, (name, kind, rows) in enumerate(columns):
        x = 24 + 207 * i
        p.rect(x, 50, 192, 132, kind)
        p.text(x + 12, 73, name, "bold")
        p.lines(x + 12, 98, rows, "small", 20)
    p.line([(60, 232), (800, 232)], "line")
    for step, x in ((0, 60), (20, 260), (40, 460), (60, 800)):
        p.rect(x - 3, 226, 6, 12, "e")
        p.text(x, 254, f"step {step}", "mid small")
    p.text(560, 218, "killed at step 47", "mid small tb")
    p.line([(545, 222), (557, 242)], "lb thick")
    p.line([(557, 222), (545, 242)], "lb thick")
    p.line([(545, 262), (545, 274), (460, 274)], "line dash")
    p.arrow(460, 274, 460, 260)
    p.text(24, 291, "It starts again at step 40 and makes steps 41 to 47 once more: the same tokens.", "small dim")
    return p


def batch() -> Picture:
    p = Picture(860, 270, "The arithmetic of a batch")
    p.text(
        24,
        32,
        "16 prompts x 8 generations = 128 sequences = 4 micro_batch_size x 4 fsdp x 8 accumulation",
        "bold",
    )
    for i in range(16):
        for j in range(8):
            p.rect(24 + 17 * i, 62 + 17 * j, 15, 15, KINDS[i // 4])
    p.text(24, 54, "a column is a prompt, a cell one completion", "small dim")
    p.text(24, 218, "colours: the four shards of fsdp,", "small dim")
    p.text(24, 234, "32 sequences each", "small dim")
    p.arrow(306, 130, 356, 130)
    for k in range(8):
        for d in range(4):
            x, y = 372 + 58 * k, 62 + 34 * d
            for s in range(4):
                p.rect(x + 12 * s, y, 11, 26, KINDS[d])
        p.text(372 + 58 * k + 24, 214, f"pass {k + 1}", "mid small")
    p.text(372, 54, "a row is a device; each pass takes 4 sequences on each", "small dim")
    p.text(372, 234, "eight passes are added up, then the optimizer moves once", "small dim")
    p.text(
        24,
        258,
        "Give some of the numbers; the others follow. Numbers that contradict each other are refused.",
        "small",
    )
    return p


def launching() -> Picture:
    p = Picture(860, 290, "Launching: two machines, eight processes, one run")
    p.text(24, 32, "Two machines, one run", "big bold")
    for m in range(2):
        x = 24 + 300 * m
        p.rect(x, 50, 280, 150, "soft")
        p.text(x + 14, 72, f"machine {m + 1}: RANK={4 * m} WORLD_SIZE=8", "mono")
        p.box(x + 14, 84, 252, 30, "launcher --nprocs=4", "e")
        for i in range(4):
            p.box(
                x + 14 + 64 * i,
                134,
                58,
                50,
                f"{4 * m + i}\nGPU {i}",
                "a" if (m, i) != (0, 0) else "b",
            )
            p.arrow(x + 43 + 64 * i, 114, x + 43 + 64 * i, 132)
    p.box(634, 64, 202, 54, "shared folder\ncheckpoints, metrics", "c")
    p.box(634, 136, 202, 54, "one mesh\n[[8,1],[fsdp,tp]]", "d")
    p.line([(67, 184), (67, 222), (520, 222)], "line dash")
    p.text(80, 216, "process 0 listens on MASTER_PORT; the others connect", "small dim")
    p.lines(
        24,
        246,
        [
            "Before JAX starts they compare versions, code and settings, and the odd one out is named.",
            "If one process fails, both launchers end the rest; launch.max_restarts starts all from the checkpoint.",
        ],
        "small",
        18,
    )
    return p


def badges() -> Picture:
    facts = [
        ("python", "3.11 or newer", "a"),
        ("jax", "0.10 to 0.12", "b"),
        ("license", "Apache-2.0", "c"),
        ("needs", "no GPU, no account", "d"),
    ]
    p = Picture(690, 30, ", ".join(f"{name} {value}" for name, value, _ in facts))
    x = 6
    for name, value, kind in facts:
        width = 9 * len(name) + 7.2 * len(value) + 22
        p.rect(x, 5, width, 20, kind)
        p.text(x + 8, 19, name, "small bold")
        p.text(x + width - 8, 19, value, "small end")
        x += width + 8
    return p
