"""The mesh and its rules: arrays name their dims by *logical axes* ("embed", "heads", "batch" ...),
and a table of rules says which mesh axis divides each. `fsdp` divides weights and the batch; `tp`
divides heads, feed-forward and vocabulary."""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike

from tunix_lite.distributed.join import disable_compilation_cache, nodes_of

# ((sizes), (axis names)), as a user types it: [[4,1],[fsdp,tp]]
MeshShape = tuple[tuple[int, ...], tuple[str, ...]]


class MeshSizes(Protocol):
    """A mesh, or anything that knows how many parts each axis has."""

    shape: Mapping[str, int]


AXES = ("fsdp", "tp")
AUTO = (AxisType.Auto,) * len(AXES)
_NO_MESH = "no mesh is set: call jax.set_mesh(make_mesh(...)) first"
_PRETEND = "JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count"

RULES: dict[str, str | None] = {
    # weights
    "embed": "fsdp",
    "vocab": "tp",
    "heads": "tp",
    "kv_heads": "tp",
    "mlp": "tp",
    "head_dim": None,
    "layers": None,
    # tokens of a short convolution
    "taps": None,
    # the experts of a layer, and what its router gives for each
    "experts": None,
    "router": None,
    # what each layer has of its own for each token (Gemma 4)
    "per_layer": None,
    # a norm's scale is too small to be worth a gather
    "norm": None,
    # the inner dim of adapters
    "rank": None,
    # a quantised weight's scales: dims that count blocks
    "embed_blocks": "fsdp",
    "mlp_blocks": "tp",
    "head_dim_blocks": None,
    "per_layer_blocks": None,
    # activations
    "batch": "fsdp",
    # prompts whose completions are sampled: a slot on any shard may need them
    "prompts": None,
    "seq": None,
    # the sequence between layers; tp: sequence parallelism (arXiv:2205.05198)
    "residual_seq": None,
    "act_embed": None,
}

# Dims that stay whole where the mesh axis does not divide them: key/value heads when there are
# fewer than tp (small, and every tp shard needs them), the rows of a batch, the prompts
# of a prefill (their completions divide), and scales.
MAY_STAY_WHOLE = {"kv_heads", "batch", "embed_blocks", "mlp_blocks"}


@dataclass(frozen=True)
class ShardingConfig:
    """Changes of a run to the table of rules: logical axis -> fsdp, tp or null (not divided)."""

    # while scoring and updating, and where weights live
    train: dict[str, str | None] = field(default_factory=dict)
    # while sampling: activations and the cache
    rollout: dict[str, str | None] = field(default_factory=dict)

    def __post_init__(self):
        for name in ("train", "rollout"):
            for axis, over in getattr(self, name).items():
                if axis not in RULES:
                    raise ValueError(
                        f"{name}.{axis}: there is no such logical axis; there is {', '.join(RULES)}"
                    )
                if axis in ("seq", "act_embed", "layers", "prompts") and over is not None:
                    raise ValueError(
                        f"{name}.{axis}={over!r}: the programs need it whole; leave it null"
                    )
                if over is not None and over not in AXES:
                    raise ValueError(
                        f"{name}.{axis}={over!r}; it is {', '.join(AXES)} or null"
                    )
        if self.rollout.get("residual_seq"):
            raise ValueError(
                "rollout.residual_seq: sampling takes one token at a time, which tp cannot divide"
            )
        tables = (self.train, self.rollout)
        if any(rules.get("batch", "fsdp") != "fsdp" for rules in tables):
            raise ValueError(
                "batch: sequences are divided over fsdp; train.embed=null copies the weights "
                "instead"
            )

    def table(self, name: str) -> dict[str, str | None]:
        """Returns all rules of the table `name`, train or rollout, with these changes."""
        return RULES | getattr(self, name)


# ---- the rules in force
# They are global to the process, as JAX's current mesh is: passed along, the rules would be a
# parameter of every function from `forward` down.

_tables = {"train": RULES, "rollout": RULES}
_active = ["train"]


def set_rules(rules: ShardingConfig) -> None:
    """Makes these the rules of the whole process, as `jax.set_mesh` does with the mesh."""
    _tables.update(train=rules.table("train"), rollout=rules.table("rollout"))


@contextlib.contextmanager
def use_rules(name: str, **changes: str | None) -> Iterator[None]:
    """Uses the rules of the table `name`, train or rollout, with these changes, inside the
    block."""
    # a name for each table, so that rules within rules find theirs
    key = name if not changes else f"{name} {sorted(changes.items())}"
    _tables[key] = _tables[name] | changes
    # A stack, as one block may stand inside another.
    _active.append(key)
    try:
        yield
    finally:
        _active.pop()


def current_rules() -> dict[str, str | None]:
    """Logical axis -> mesh axis, or None: not divided."""
    return _tables[_active[-1]]


def check_mesh_shape(mesh_shape: MeshShape) -> None:
    """Raises ValueError unless `mesh_shape` reads as [[sizes], [axis names]]."""
    right = (
        "write sizes, then names: 'model.mesh_shape=[[4,1],[fsdp,tp]]'; one size may be -1, 'the "
        "rest'"
    )
    if len(mesh_shape) != 2 or len(mesh_shape[0]) != len(mesh_shape[1]):
        raise ValueError(
            f"{as_text(mesh_shape)} is not a list of sizes and a list of as many names; {right}"
        )
    sizes, names = mesh_shape
    unknown = [name for name in names if name not in AXES]
    if unknown:
        raise ValueError(
            f"unknown axis {unknown[0]!r}; the axes are {', '.join(AXES)}; {right}"
        )
    if len(set(names)) != len(names):
        raise ValueError(f"an axis is named twice in {as_text(mesh_shape)}; {right}")
    # For isinstance a boolean is an int, too.
    are_sizes = all(type(size) is int and (size >= 1 or size == -1) for size in sizes)
    if not are_sizes or list(sizes).count(-1) > 1:
        raise ValueError(f"sizes {list(sizes)} must be 1 or more, and at most one -1; {right}")


def resolve_mesh_shape(
    mesh_shape: MeshShape,
    num_devices: int,
    takes_all: bool = False,
    can_simulate: bool = False,
) -> dict[str, int]:
    """Sizes by axis name, both axes present. Without a -1 the mesh may be smaller than
    `num_devices`, unless takes_all. Raises ValueError, which names a mesh that would fit;
    can_simulate: and how a CPU simulates more devices."""
    check_mesh_shape(mesh_shape)
    sizes = {name: 1 for name in AXES} | dict(zip(mesh_shape[1], mesh_shape[0]))
    known = math.prod(size for size in sizes.values() if size != -1)
    resolved = {
        name: num_devices // known if size == -1 else size for name, size in sizes.items()
    }
    has_rest = -1 in sizes.values()
    may_be_smaller = not takes_all and not has_rest and known < num_devices
    if may_be_smaller or np.prod(list(resolved.values())) == num_devices:
        return resolved

    # The mesh that would fit has the largest possible tp up to the one asked for.
    largest = min(abs(sizes["tp"]), num_devices)
    tp = next(t for t in range(largest, 0, -1) if num_devices % t == 0)
    needed = f"{'a multiple of ' if has_rest else ''}{known}"
    pretend = ""
    if can_simulate and known > num_devices:
        pretend = f"; {_PRETEND}={known} before the command pretends that many"
    raise ValueError(
        f"{as_text(mesh_shape)} needs {needed} devices, but jax sees {num_devices}; "
        f"'model.mesh_shape=[[{num_devices // tp},{tp}],[fsdp,tp]]' would fit, and "
        f"[[-1,1],[fsdp,tp]] always does{pretend}"
    )


def make_mesh(
    mesh_shape: MeshShape,
    devices: Sequence[jax.Device] | None = None,
    tp_across_nodes: bool = False,
) -> Mesh:
    """The mesh over all devices (or those given), or over the first ones, if it is smaller. Raises
    ValueError. Over several nodes, tp stays inside each of them. A mesh of several CPU devices
    turns off jax's compilation cache (distributed.join).
    Example: `jax.set_mesh(make_mesh(((-1, 1), ("fsdp", "tp"))))`: all devices over fsdp."""
    if devices is None:
        devices = jax.devices()
    # a process without a device in the mesh would wait for ever
    has_peers = len({device.process_index for device in devices}) > 1
    sizes = resolve_mesh_shape(
        mesh_shape, len(devices), takes_all=has_peers, can_simulate=not has_peers
    )
    tp = sizes["tp"]
    if sizes["fsdp"] * tp > 1 and devices[0].platform == "cpu":
        disable_compilation_cache()
    nodes = nodes_of(devices[: sizes["fsdp"] * tp])

    # Each node holds whole tp groups, unless the user asks for tp over the network.
    node_sizes = [len(node) for node in nodes]
    if not any(size % tp for size in node_sizes):
        arranged = [_arranged((len(node) // tp, tp), node) for node in nodes]
    elif tp_across_nodes:
        arranged = [_arranged((1, len(node)), node).ravel() for node in nodes]
    else:
        possible = range(1, min(node_sizes) + 1)
        common = math.gcd(*node_sizes)
        fits = [str(n) for n in possible if common % n == 0]
        raise ValueError(
            f"tp={tp} would cross the network between {len(nodes)} nodes with {min(node_sizes)} "
            f"devices each, in every layer; tp could be {', '.join(fits)}, and "
            "launch.tp_across_nodes=true allows it"
        )
    return Mesh(np.concatenate(arranged).reshape(-1, tp), AXES, axis_types=AUTO)


@contextlib.contextmanager
def part_of_mesh(sizes: dict[str, int]) -> Iterator[None]:
    """Inside, the first devices of the current mesh are the mesh, with these sizes by axis."""
    mesh = jax.sharding.get_mesh()
    if dict(mesh.shape) != sizes:
        mesh = make_mesh((tuple(sizes.values()), tuple(sizes)), list(mesh.devices.flat))
    with jax.set_mesh(mesh):
        yield


def split_devices(
    mesh_shape: MeshShape,
    own_shape: MeshShape,
    devices: Sequence[jax.Device],
) -> tuple[list[jax.Device], list[jax.Device]]:
    """Splits the devices: the first ones learn, and those after them sample (rollout.mesh_shape).
    Raises ValueError if there are not enough, and over processes."""
    if len({device.process_index for device in devices}) > 1:
        raise ValueError(
            f"{as_text(own_shape)}: over several processes sampling has no devices of its own yet; "
            "set rollout.mesh_shape=null"
        )
    sampling = math.prod(own_shape[0])
    known = math.prod(size for size in mesh_shape[0] if size != -1)
    left = len(devices) - sampling
    has_rest = -1 in mesh_shape[0]
    if left < known or (has_rest and left % known):
        learning = f"{'a multiple of ' if has_rest and known > 1 else ''}{known}"
        pretend = ""
        if devices[0].platform == "cpu":
            pretend = f"; {_PRETEND}={known + sampling} before the command pretends that many"
        raise ValueError(
            f"{as_text(own_shape)} takes {sampling}, model.mesh_shape={as_text(mesh_shape)} takes "
            f"{learning}, and jax sees {len(devices)}{pretend}"
        )
    # -1 takes what sampling leaves
    learning = left if has_rest else known
    return list(devices[:learning]), list(devices[learning : learning + sampling])


def _arranged(sizes: tuple[int, int], devices: list[jax.Device]) -> np.ndarray:
    """The devices of one node, as [fsdp, tp], neighbours on its own network side by side."""
    try:
        return jax.make_mesh(sizes, AXES, axis_types=AUTO, devices=devices).devices
    except NotImplementedError:
        # A large TPU slice, whose torus these sizes do not follow: then an axis may be split.
        return mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)


def spec(
    axes: tuple[str, ...],
    shape: tuple[int, ...],
    mesh: MeshSizes,
    rules: dict[str, str | None] | None = None,
) -> P:
    """The partition spec of an array whose dims have these logical axes. rules: None: the current
    ones. Raises ValueError for a dim that its mesh axis does not divide, and for two dims over one
    mesh axis."""
    assert len(axes) == len(shape), (axes, shape)
    if rules is None:
        rules = current_rules()
    entries = []
    for name, size in zip(axes, shape):
        axis = rules[name]
        parts = 1 if axis is None else mesh.shape[axis]
        if size % parts and name not in MAY_STAY_WHOLE:
            fits = ", ".join(str(n) for n in range(1, 2 * parts) if size % n == 0)
            # A mesh of as many devices whose `axis` divides `size`; the other axis has the rest.
            total = math.prod(mesh.shape.values())
            common = math.gcd(size, total)
            part = max(n for n in range(1, parts + 1) if common % n == 0)
            sizes = [part if other == axis else total // part for other in AXES]
            raise ValueError(
                f"{name}={size} is not a multiple of the mesh's {axis}={parts}; {axis} could be "
                f"{fits}: 'model.mesh_shape=[[{sizes[0]},{sizes[1]}],[fsdp,tp]]'"
            )
        # An axis of one part divides nothing, so two dims may name it.
        entries.append(axis if parts > 1 and size % parts == 0 else None)
        if entries[-1] is not None and entries.count(axis) > 1:
            raise ValueError(
                f"the rules divide two dims of {axes} over {axis}; set sharding.train.NAME or "
                "sharding.rollout.NAME to null for one of them"
            )
    return P(*entries)


def elements_on_device(
    shape: tuple[int, ...],
    axes: tuple[str, ...],
    mesh_shape: dict[str, int],
    rules: dict[str, str | None] | None,
) -> int:
    """Counts the elements of an array on a device of such a mesh, by arithmetic. Raises as
    `spec`."""
    # a mesh without devices: a plan may be of any number of them
    mesh = AbstractMesh(tuple(mesh_shape.values()), tuple(mesh_shape))
    entries = spec(axes, shape, mesh, rules)
    parts = [1 if axis is None else mesh_shape[axis] for axis in entries]
    return math.prod(size // n for size, n in zip(shape, parts))


def sharding(
    axes: tuple[str, ...],
    shape: tuple[int, ...],
    rules: dict[str, str | None] | None = None,
) -> NamedSharding:
    """The sharding of an array with these logical axes on the current mesh. Raises as `spec`."""
    mesh = current_mesh()
    return NamedSharding(mesh, spec(axes, shape, mesh, rules))


def constrain(x: jax.Array, *axes: str) -> jax.Array:
    """`x` with the sharding of these logical axes, inside jit. Without a mesh it raises
    RuntimeError."""
    # Inside jit the mesh is known by its shape only, without devices.
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        raise RuntimeError(_NO_MESH)
    return jax.lax.with_sharding_constraint(x, spec(axes, x.shape, mesh))


def move(x: jax.Array, axes: tuple[str, ...], to: tuple[str, ...]) -> jax.Array:
    """Moves x from the sharding of the axes `axes` to that of `to`; its gradient goes the other
    way."""
    # A plain constraint would give the gradient the same sharding as the value: every device would
    # sum all of it, where a reduce-scatter is enough.
    mesh = jax.sharding.get_abstract_mesh()
    return _move(x, spec(axes, x.shape, mesh), spec(to, x.shape, mesh))


def gather(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """A weight gathered over fsdp, to compute with. Its gradient is divided over fsdp, except where
    each shard keeps its own (training.sync_gradients_every)."""
    back = _gradient_spec(axes, x.shape)
    to = without(spec(axes, x.shape, jax.sharding.get_abstract_mesh()))
    return _move(x, back, to)


def constrain_gradient(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """The gradient of a weight with these logical axes, with its sharding."""
    return jax.lax.with_sharding_constraint(x, _gradient_spec(axes, x.shape))


def _gradient_spec(axes: tuple[str, ...], shape: tuple[int, ...]) -> P:
    of_weight = spec(axes, shape, jax.sharding.get_abstract_mesh())
    # Where a vmap over shards divides the batch (micro_batches.py), every shard keeps a gradient of
    # its own until they are summed.
    if current_rules()["batch"]:
        return of_weight
    return without(of_weight)


def without(divided: P) -> P:
    """The same spec without a division over fsdp."""
    return P(*(None if entry == "fsdp" else entry for entry in divided))


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _move(x: jax.Array, back: P, to: P) -> jax.Array:
    return jax.lax.with_sharding_constraint(x, to)


_move.defvjp(
    lambda x, back, to: (jax.lax.with_sharding_constraint(x, to), None),
    lambda back, to, _, cotangent: (jax.lax.with_sharding_constraint(cotangent, back),),
)


def axis_size(axis: str) -> int:
    """Returns the size of an axis of the current mesh, inside jit and outside."""
    return jax.sharding.get_abstract_mesh().shape[axis]


def parts_of(logical: str) -> int:
    """Into how many parts the current rules divide a dim of this logical axis, on the current
    mesh."""
    axis = current_rules()[logical]
    return 1 if axis is None else axis_size(axis)


def put(x: ArrayLike, *axes: str) -> jax.Array:
    """A host array, the same on all processes, on the current mesh with these logical axes.
    Example: `put(np.int32(0))` is the step of a state, whole on every device."""
    x = np.asarray(x)
    to = sharding(axes, x.shape)
    # device_put would compare the array across processes, each time.
    if jax.process_count() > 1:
        return jax.make_array_from_callback(x.shape, to, lambda part: x[part])
    return jax.device_put(x, to)


def own_rows(count: int, num_rows: int) -> np.ndarray:
    """[count] bool: which rows of an update's batch this process's devices hold. num_rows: of an
    update; a batch with fewer has empty rows after them. One with more is cut later, so all may
    be."""
    if count > num_rows:
        return np.ones(count, bool)
    is_own = np.zeros(num_rows, bool)
    divided = sharding(("batch",), is_own.shape)
    for index in divided.addressable_devices_indices_map(is_own.shape).values():
        is_own[index] = True
    return is_own[:count]


def current_mesh() -> Mesh:
    """The mesh that `jax.set_mesh` made current. Raises RuntimeError if there is none."""
    mesh = jax.sharding.get_mesh()
    if mesh.empty:
        raise RuntimeError(_NO_MESH)
    return mesh


def current_platform() -> str:
    """The platform of the current mesh's devices, or JAX's default one. Not for inside jit."""
    mesh = jax.sharding.get_mesh()
    if mesh.empty:
        return jax.default_backend()
    return mesh.devices.flat[0].platform


def devices_taken(mesh: Mesh) -> str:
    """Says how many devices the mesh takes: "8", or "2 of 8, the first ones"."""
    # a GPU machine has a CPU device, too
    seen = jax.device_count(mesh.devices.flat[0].platform)
    return f"{mesh.size}" if mesh.size == seen else f"{mesh.size} of {seen}, the first ones"


def as_text(mesh_shape: Sequence) -> str:
    """The mesh as a user types it: [[4,1],[fsdp,tp]]."""
    lists = [list(part) if isinstance(part, tuple) else part for part in mesh_shape]
    return str(lists).replace(" ", "").replace("'", "")
