"""The mesh and its rules: which dim of an array is divided over which axis of the mesh.

Arrays name their dims by *logical axes* ("embed", "heads", "batch" ...); a table of rules says
which mesh axis each one is divided over. Models never mention a mesh axis. `fsdp` divides weights,
optimizer state and the batch; `tp` divides heads, feed-forward and vocabulary. There are two
tables, one while training and one while sampling (`ShardingConfig`); what a run changes in them
stands under `sharding` in its settings.
"""

import contextlib
import math
from dataclasses import dataclass, field
from functools import partial

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tunix_lite.distributed.join import disable_compilation_cache, nodes_of

MeshShape = tuple[tuple[int, ...], tuple[str, ...]]

AXES = ("fsdp", "tp")
PRETEND = "JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count"

RULES: dict[str, str | None] = {
    # weights
    "embed": "fsdp",
    "vocab": "tp",
    "heads": "tp",
    "kv_heads": "tp",
    "mlp": "tp",
    "head_dim": None,
    "layers": None,
    # a norm's scale is too small to be worth a gather
    "norm": None,
    # of adapters
    "rank": None,
    # a quantised weight's scales: dims that count blocks
    "embed_blocks": "fsdp",
    "mlp_blocks": "tp",
    "head_dim_blocks": None,
    # activations
    "batch": "fsdp",
    # that wait to be continued: a slot on any shard may need them
    "prompts": None,
    "seq": None,
    # of what runs between layers; tp: sequence parallelism (arXiv:2205.05198)
    "residual_seq": None,
    "act_embed": None,
}

# Dims that stay whole where the mesh axis does not divide them: key/value heads when there are
# fewer than tp (small, and every tp shard needs them), the prompts of a rollout (their completions
# divide), and scales.
MAY_STAY_WHOLE = {"kv_heads", "batch", "embed_blocks", "mlp_blocks"}


@dataclass(frozen=True)
class ShardingConfig:
    """What a run changes in the table of rules: logical axis -> fsdp, tp or null (not divided)."""

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
                    raise ValueError(f"{name}.{axis}={over!r}; it is {', '.join(AXES)} or null")
        if self.rollout.get("residual_seq"):
            raise ValueError(
                "rollout.residual_seq: a token that is sampled has no length to divide"
            )
        if self.train.get("batch", "fsdp") != "fsdp" or self.rollout.get("batch", "fsdp") != "fsdp":
            raise ValueError(
                "batch: sequences are divided over fsdp; train.embed=null copies the weights "
                "instead"
            )

    def table(self, name: str) -> dict[str, str | None]:
        """All rules of the table `name`, train or rollout, with these changes."""
        return RULES | getattr(self, name)


_tables = {"train": RULES, "rollout": RULES}
_active = ["train"]


def set_rules(rules: ShardingConfig) -> None:
    """Makes these the rules of the process, as `jax.set_mesh` does the mesh."""
    _tables.update(train=rules.table("train"), rollout=rules.table("rollout"))


@contextlib.contextmanager
def use_rules(name: str, **changes: str | None):
    """Inside, the table `name`, train or rollout, holds, with these changes. What is traced there
    keeps it."""
    key = name if not changes else f"{name} {sorted(changes.items())}"
    _tables[key] = _tables[name] | changes
    _active.append(key)
    try:
        yield
    finally:
        _active.pop()


def current_rules() -> dict[str, str | None]:
    return _tables[_active[-1]]


def check_mesh_shape(mesh_shape: MeshShape) -> None:
    """Raises ValueError unless `mesh_shape` reads as [[sizes], [axis names]]."""
    right = (
        "write it as [[fsdp, tp], [fsdp, tp]], for example [[4,1],[fsdp,tp]]; one size may be -1, "
        "'the rest'"
    )
    if len(mesh_shape) != 2 or len(mesh_shape[0]) != len(mesh_shape[1]):
        raise ValueError(
            f"{as_text(mesh_shape)} is not a list of sizes and a list of as many names; {right}"
        )
    sizes, names = mesh_shape
    if any(type(size) is not int for size in sizes) or any(type(name) is not str for name in names):
        raise ValueError(
            f"{as_text(mesh_shape)} must hold whole numbers first and names second; {right}"
        )
    if unknown := [name for name in names if name not in AXES]:
        raise ValueError(f"unknown axis {unknown[0]!r}; the axes are {', '.join(AXES)}; {right}")
    if len(set(names)) != len(names):
        raise ValueError(f"an axis is named twice in {as_text(mesh_shape)}; {right}")
    if any(size < 1 and size != -1 for size in sizes) or list(sizes).count(-1) > 1:
        raise ValueError(f"sizes {list(sizes)} must be 1 or more, and at most one -1; {right}")


def resolve_mesh_shape(
    mesh_shape: MeshShape, num_devices: int, takes_all: bool = False, could_pretend: bool = False
) -> dict[str, int]:
    """Sizes by axis name, both axes present and -1 filled in, so that all devices are taken.
    Without a -1 the mesh may be smaller than `num_devices`, unless it takes_all.

    Raises ValueError, naming both numbers and a mesh that would fit, if it needs more of them, or
    another number; where the program could_pretend that there are more, also how.
    """
    check_mesh_shape(mesh_shape)
    sizes = {name: 1 for name in AXES} | dict(zip(mesh_shape[1], mesh_shape[0]))
    known = int(np.prod([size for size in sizes.values() if size != -1]))
    resolved = {name: num_devices // known if size == -1 else size for name, size in sizes.items()}
    is_smaller = -1 not in sizes.values() and known < num_devices
    if np.prod(list(resolved.values())) != num_devices and (takes_all or not is_smaller):
        tp = next(
            t for t in range(min(abs(sizes["tp"]), num_devices), 0, -1) if num_devices % t == 0
        )
        pretend = f"; {PRETEND}={known} before the command pretends that many"
        raise ValueError(
            f"{as_text(mesh_shape)} needs "
            f"{'a multiple of ' if -1 in sizes.values() else ''}{known} devices, but jax "
            f"sees {num_devices}; [[{num_devices // tp},{tp}],[fsdp,tp]] would fit, and "
            "[[-1,1],[fsdp,tp]] always does"
            + (pretend if could_pretend and known > num_devices else "")
        )
    return resolved


def make_mesh(mesh_shape: MeshShape, devices=None, tp_across_nodes: bool = False) -> Mesh:
    """The mesh over all devices (or those given), or over the first ones, if it is smaller. Its
    axes are Auto: the compiler places what we do not.

    Several processes must all have a part in it. Over several nodes, tp lies inside each of them,
    and only fsdp crosses. Raises ValueError where that cannot be.
    """
    devices = jax.devices() if devices is None else devices
    if len(devices) > 1 and devices[0].platform == "cpu":
        disable_compilation_cache()
    has_peers = len({device.process_index for device in devices}) > 1
    sizes = resolve_mesh_shape(
        mesh_shape, len(devices), takes_all=has_peers, could_pretend=not has_peers
    )
    tp, devices = sizes["tp"], devices[: sizes["fsdp"] * sizes["tp"]]
    nodes = nodes_of(devices)
    sizes = [len(node) for node in nodes]
    if any(size % tp for size in sizes):
        if not tp_across_nodes:
            fits = ", ".join(
                str(n) for n in range(1, min(sizes) + 1) if not any(size % n for size in sizes)
            )
            raise ValueError(
                f"tp={tp} would cross the network between {len(nodes)} nodes with {min(sizes)} "
                "devices each, in every "
                f"layer; tp could be {fits}, and launch.tp_across_nodes=true does it all the same"
            )
        laid_out = [_laid_out((1, len(node)), node).ravel() for node in nodes]
    else:
        laid_out = [_laid_out((len(node) // tp, tp), node) for node in nodes]
    return Mesh(
        np.concatenate(laid_out).reshape(-1, tp), AXES, axis_types=(AxisType.Auto,) * len(AXES)
    )


def _laid_out(sizes: tuple[int, int], devices: list) -> np.ndarray:
    """The devices of one node, as [fsdp, tp], neighbours on its own network side by side."""
    try:
        return jax.make_mesh(
            sizes, AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices
        ).devices
    except (
        NotImplementedError
    ):  # a large TPU slice, whose torus these sizes do not follow: then an axis may be split
        return mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)


def spec(axes: tuple[str, ...], shape: tuple[int, ...], mesh, rules=None) -> P:
    """The partition spec of an array whose dims carry these logical axes; rules: None means the
    current table.

    Raises ValueError for a dim that its mesh axis does not divide, unless it is one that may stay
    whole, and for two dims over one mesh axis.
    """
    assert len(axes) == len(shape), (axes, shape)
    rules = current_rules() if rules is None else rules
    entries = []
    for name, size in zip(axes, shape):
        axis = rules[name]
        parts = 1 if axis is None else mesh.shape[axis]
        if size % parts and name not in MAY_STAY_WHOLE:
            fits = ", ".join(str(n) for n in range(1, 2 * parts) if size % n == 0)
            raise ValueError(
                f"{name}={size} is not a multiple of the mesh's {axis}={parts}; {axis} could be "
                f"{fits}"
            )
        entries.append(axis if parts > 1 and size % parts == 0 else None)
        if entries[-1] is not None and entries.count(axis) > 1:
            raise ValueError(
                f"the rules divide two dims of {axes} over {axis}; sharding. must leave one of "
                "them null"
            )
    return P(*entries)


def elements_on_device(
    shape: tuple[int, ...],
    axes: tuple[str, ...],
    mesh_shape: dict[str, int],
    rules: dict[str, str | None] | None = None,
) -> int:
    """How many elements of an array a device of such a mesh holds, by arithmetic: no device is
    needed.

    mesh_shape: sizes by axis name. axes, rules and errors: as `spec` has them.
    """
    lies = spec(axes, shape, AbstractMesh(tuple(mesh_shape.values()), tuple(mesh_shape)), rules)
    return math.prod(
        size // (1 if axis is None else mesh_shape[axis]) for size, axis in zip(shape, lies)
    )


def sharding(axes: tuple[str, ...], shape: tuple[int, ...], rules=None) -> NamedSharding:
    """Where an array with these logical axes lives on the current mesh."""
    mesh = current_mesh()
    return NamedSharding(mesh, spec(axes, shape, mesh, rules))


def constrain(x: jax.Array, *axes: str) -> jax.Array:
    """`x`, told inside jit how it lies on the mesh. Never a no-op: without a mesh it raises."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        raise RuntimeError(
            "no mesh is set: call jax.set_mesh(make_mesh(...)) before running the model"
        )
    return jax.lax.with_sharding_constraint(x, spec(axes, x.shape, mesh))


def move(x: jax.Array, axes: tuple[str, ...], to: tuple[str, ...]) -> jax.Array:
    """x, which lies as `axes` say, as `to` says; its gradient goes the other way, and arrives lying
    as x does.

    A plain constraint would hold the gradient to the same place as the value: summed whole on every
    device where a reduce-scatter does.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return _move(x, spec(axes, x.shape, mesh), spec(to, x.shape, mesh))


def gather(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """A weight, whole over the axis that divides the batch, for the moment that it is used; its
    gradient divided."""
    return _move(
        x,
        _gradient_spec(axes, x.shape),
        without(spec(axes, x.shape, jax.sharding.get_abstract_mesh())),
    )


def constrain_gradient(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """The gradient of a weight, told where it lies."""
    return jax.lax.with_sharding_constraint(x, _gradient_spec(axes, x.shape))


def _gradient_spec(axes: tuple[str, ...], shape: tuple[int, ...]) -> P:
    lies = spec(axes, shape, jax.sharding.get_abstract_mesh())
    # Where the batch is divided by hand (step.py), every shard keeps a gradient of its own until
    # they are summed.
    return lies if current_rules()["batch"] else without(lies)


def without(lies: P, axis: str = "fsdp") -> P:
    """The same spec without a division over `axis`."""
    return P(*(None if entry == axis else entry for entry in lies))


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _move(x, back: P, to: P):
    return jax.lax.with_sharding_constraint(x, to)


_move.defvjp(
    lambda x, back, to: (jax.lax.with_sharding_constraint(x, to), None),
    lambda back, to, _, slope: (jax.lax.with_sharding_constraint(slope, back),),
)


def axis_size(axis: str) -> int:
    """How many parts the current mesh's axis has; inside jit as outside."""
    return jax.sharding.get_abstract_mesh().shape[axis]


def parts_of(logical: str) -> int:
    """How many parts the current rules cut a dim of this logical axis into, on the current mesh."""
    axis = current_rules()[logical]
    return 1 if axis is None else axis_size(axis)


def gathered_sharding(place: NamedSharding, axis: str = "fsdp") -> NamedSharding:
    """The same place without a division over `axis`."""
    return NamedSharding(place.mesh, without(place.spec, axis))


def put(x, *axes: str) -> jax.Array:
    """A host array, the same on all processes, placed on the current mesh."""
    x = np.asarray(x)
    place = sharding(axes, x.shape)
    # device_put would compare it across processes, each time
    if jax.process_count() > 1:
        return jax.make_array_from_callback(x.shape, place, lambda part: x[part])
    return jax.device_put(x, place)


def current_mesh() -> Mesh:
    """The mesh that `jax.set_mesh` made current. Raises RuntimeError if there is none."""
    mesh = jax.sharding.get_mesh()
    if mesh.empty:
        raise RuntimeError("no mesh is set: call jax.set_mesh(make_mesh(...)) first")
    return mesh


def of_all(mesh: Mesh) -> str:
    """How many of the devices that jax sees the mesh takes: "8", or "2 of 8, the first ones"."""
    seen = jax.device_count(mesh.devices.flat[0].platform)
    return f"{mesh.size}" if mesh.size == seen else f"{mesh.size} of {seen}, the first ones"


def as_text(mesh_shape) -> str:
    """The mesh as people type it: [[4,1],[fsdp,tp]]."""
    return (
        str([list(part) if isinstance(part, tuple) else part for part in mesh_shape])
        .replace(" ", "")
        .replace("'", "")
    )
