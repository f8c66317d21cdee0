"""What a program communicates is read from its text: which axis, how many bytes, how often."""

import importlib.util
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from conftest import set_mesh
from jax.lax import with_sharding_constraint as constrained
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tunix_lite.parallel.collectives import collectives, grouped, sent_bytes

MESH = {"fsdp": 2, "tp": 2}
LAYERS, ROWS, EMBED, MLP = 3, 8, 16, 32


def read(function, *args, mesh=None, out=None, dtype=jnp.float32):
    """The collectives of a program compiled for arguments of these shapes, divided so."""
    mesh = mesh or set_mesh(2, 2)
    jax.set_mesh(mesh)
    places = [jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec)) for shape, spec in args]
    out = None if out is None else NamedSharding(mesh, out)
    return collectives(jax.jit(function, out_shardings=out).lower(*places).compile().as_text(), dict(mesh.shape))


def layers(w_LDF, x_BD):
    """Each layer gathers its weight over fsdp and adds up its output over tp."""

    def layer(x_BD, w_DF):
        w_DF = constrained(w_DF, P(None, "tp"))
        h_BF = constrained(x_BD @ w_DF, P("fsdp", "tp"))
        return constrained(jnp.tanh(h_BF) @ w_DF.T, P("fsdp", None)), None

    return jax.lax.scan(layer, x_BD, w_LDF)[0]


WEIGHTS = (LAYERS, EMBED, MLP), P(None, "fsdp", "tp")
BATCH = (ROWS, EMBED), P("fsdp", None)


def summary(found):
    return {(c.kind, c.axis, c.count, c.num_bytes) for c in found}


def test_a_gather_in_a_loop_counts_once_per_turn():
    found = read(layers, WEIGHTS, BATCH)
    gather = ("all-gather", "fsdp", LAYERS, EMBED * MLP // 2 * 4)  # half of a layer's columns: the rest is tp's
    assert summary(found) == {gather, ("all-reduce", "tp", LAYERS, ROWS // 2 * EMBED * 4)}
    assert all(c.in_loop and c.count_known for c in found)
    # summed up by kind and axis; a ring sends half of what is gathered, and what is added up twice
    gathers, sums = grouped(found)
    gathered, reduced = LAYERS * EMBED * MLP // 2 * 4, LAYERS * ROWS // 2 * EMBED * 4
    assert (gathers.kind, gathers.axis, gathers.count, gathers.total_bytes) == ("all-gather", "fsdp", 3, gathered)
    assert (gathers.sent_bytes, sums.sent_bytes) == (gathered // 2, reduced)
    assert (
        sent_bytes(replace(found[0], group_size=16))
        == found[0].total_bytes * (30 if found[0].kind == "all-reduce" else 15) // 16
    )


def test_a_loop_that_the_data_ends_counts_as_one_turn_and_says_so():
    def until_large(w_LDF, x_BD):
        return jax.lax.while_loop(lambda x_BD: jnp.max(x_BD) < 9, lambda x_BD: layers(w_LDF, x_BD), x_BD)

    found = read(until_large, WEIGHTS, BATCH)
    assert {c.count for c in found if c.axis == "fsdp" and c.kind == "all-gather"} == {LAYERS}
    assert not any(c.count_known for c in found)


def test_of_branches_the_one_that_sends_most_counts():
    def branched(x_BD):
        def summed(columns):
            total = constrained(x_BD[:, :columns].sum(axis=0), P(None))
            return jnp.pad(total, (0, EMBED - columns))

        return jax.lax.switch(jnp.int32(x_BD[0, 0]), [partial(summed, columns) for columns in (2, EMBED, 4)])

    in_branches = [c for c in read(branched, BATCH) if not c.count_known]
    assert summary(in_branches) == {("all-reduce", "fsdp", 1, EMBED * 4)}


def test_each_kind_is_read_with_the_bytes_of_the_whole_buffer():
    def each(x_BD):
        def shard(x):
            return (
                jax.lax.psum_scatter(x, "tp", tiled=True),
                jax.lax.ppermute(x, "fsdp", [(0, 1), (1, 0)]),
                jax.lax.all_to_all(x, "tp", 0, 1, tiled=True),
                jax.lax.all_gather(x, ("fsdp", "tp"), tiled=True),
                jax.lax.psum(x[:1], "fsdp"),
            )

        specs = (P(("fsdp", "tp"), None), P("fsdp", None), P("fsdp", "tp"), P(None, None), P(None, None))
        return jax.shard_map(shard, in_specs=P("fsdp", None), out_specs=specs, check_vma=False)(x_BD)

    found = read(each, BATCH)
    part = ROWS // 2 * EMBED * 4
    assert summary(found) == {
        ("reduce-scatter", "tp", 1, part),
        ("collective-permute", "fsdp", 1, part),
        ("all-to-all", "tp", 1, part),
        ("all-gather", "fsdp+tp", 1, 4 * part),
        ("all-reduce", "fsdp", 1, EMBED * 4),
    }
    assert not any(c.in_loop for c in found)


@pytest.mark.parametrize(
    "groups, axis",
    [
        ("{{0,1,2},{3,4,5}}", "tp"),
        ("{{0,3},{1,4},{2,5}}", "fsdp"),
        ("[3,2]<=[2,3]T(1,0)", "fsdp"),
        ("mesh['a'=2,'b'=3] {'a'}", "fsdp"),
        ("mesh['a'=3,'b'=2], device_ids=([2,3]T(1,0)) {'b'}", "fsdp"),  # ids 0 3, 1 4, 2 5 along b
        ("mesh['a'=6] {'a':(1)2}", "fsdp"),
        ("{{0,1},{2,3},{4,5}}", "other"),
        ("{{0,1,2},{3},{4},{5}}", "other"),
    ],
)
def test_groups_are_read_however_they_are_written(groups, axis):
    text = f"""ENTRY %main (p: f32[4]) -> f32[4] {{
  %p = f32[4]{{0}} parameter(0)
  ROOT %sum = f32[4]{{0}} all-reduce(%p), channel_id=1, replica_groups={groups}, use_global_device_ids=true
}}"""
    assert [c.axis for c in collectives(text, {"fsdp": 2, "tp": 3})] == ([axis] if axis else [])


def snippet(*lines, computations=""):
    """A program's text: its entry's instructions, after some computations."""
    body = "".join(f"  {line}\n" for line in lines)
    return f"HloModule jit_f, num_partitions=4\n\n{computations}\n\nENTRY %main (p: bf16[8]) -> bf16[8] {{\n{body}}}\n"


@pytest.mark.parametrize(
    "start, kind, shapes, num_bytes",
    [
        # operands, then results: gathers of several arrays are one
        ("((bf16[4,8]{1,0}, f32[2]{0}), (bf16[8,8]{1,0}, /*index=1*/f32[4]{0})) all-gather-start(%p, %q)", "all-gather", "bf16[8,8], f32[4]", 144),
        ("((bf16[8,8]{1,0}), bf16[4,8]{1,0}) reduce-scatter-start(%p)", "reduce-scatter", "bf16[8,8]", 128),
        ("((s4[8,3]{1,0}), s4[8,3]{1,0}) all-to-all-start(%p)", "all-to-all", "s4[8,3]", 12),
        ("(bf16[8]{0:T(256)(2,1)}, bf16[8]{0:T(256)(2,1)S(1)}, u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(%p)", "collective-permute", "bf16[8]", 16),
        ("(bf16[8]{0}, pred[4]{0}) all-reduce-start(%p, %q)", "all-reduce", "bf16[8], pred[4]", 20),
    ],
)  # fmt: skip
def test_what_starts_and_is_done_later_counts_once(start, kind, shapes, num_bytes):
    who = "source_target_pairs={{0,2},{2,0},{1,3},{3,1}}" if "permute" in start else "replica_groups={{0,2},{1,3}}"
    done = f'%done = bf16[8]{{0}} {kind}-done(%start), metadata={{op_name="jit(f)/dot"}}'
    text = snippet(
        "%p = bf16[8]{0} parameter(0)", f'%start = {start}, {who}, metadata={{op_name="jit(f)/while/body/dot"}}', done
    )
    (found,) = collectives(text, MESH)
    assert (found.kind, found.axis, found.count, found.shapes) == (kind, "fsdp", 1, shapes)
    assert found.num_bytes == num_bytes


ADD = """%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}
"""


@pytest.mark.parametrize(
    "start, step, condition, turns",
    [
        ("0", "add(%i, %one)", "compare(%j, %end), direction=LT", 6),
        ("13", "subtract(%i, %one)", "compare(%j, %end), direction=GT", 7),
        ("0", "add(%i, %one)", "fusion(%j, %end), kind=kLoop, calls=%less", 6),
        ("0", "multiply(%i, %unknown)", "compare(%j, %end), direction=LT", None),
    ],
)
def test_turns_are_counted_where_only_the_condition_tells(start, step, condition, turns):
    """As TPU writes loops."""
    computations = f"""%less (a: s32[], b: s32[]) -> pred[] {{
  %a = s32[]{{:T(128)}} parameter(0)
  %b = s32[]{{:T(128)}} parameter(1)
  ROOT %lt = pred[]{{:T(512)}} compare(%a, %b), direction=LT
}}

%body (state: (s32[], f32[8], s32[])) -> (s32[], f32[8], s32[]) {{
  %one = s32[]{{:T(128)}} constant(1)
  %state = (s32[]{{:T(128)}}, f32[8]{{0:T(256)S(1)}}, s32[]{{:T(128)}}) parameter(0)
  %i = s32[]{{:T(128)}} get-tuple-element(%state), index=0
  %x = f32[8]{{0:T(256)S(1)}} get-tuple-element(%state), index=1
  %same = s32[]{{:T(128)}} get-tuple-element(%state), index=2
  %unknown = s32[]{{:T(128)}} custom-call(%x), custom_call_target="Sizes"
  %next = s32[]{{:T(128)}} {step}
  %r = f32[8]{{0:T(256)S(1)}} all-reduce(%x), replica_groups=[2,2]<=[4], to_apply=%add
  ROOT %t = (s32[]{{:T(128)}}, f32[8]{{0:T(256)S(1)}}, s32[]{{:T(128)}}) tuple(%next, %r, %same)
}}

%cond (now: (s32[], f32[8], s32[])) -> pred[] {{
  %end = s32[]{{:T(128)}} constant(6)
  %now = (s32[]{{:T(128)}}, f32[8]{{0:T(256)S(1)}}, s32[]{{:T(128)}}) parameter(0)
  %j = s32[]{{:T(128)}} get-tuple-element(%now), index=0
  ROOT %go = pred[]{{:T(512)}} {condition}, metadata={{op_name="jit(f)/while/cond/lt"}}
}}
"""
    text = snippet(
        "%p = f32[8]{0:T(256)} parameter(0)",
        f"%first = s32[]{{:T(128)}} constant({start})",
        "%copied = s32[]{:T(128)} copy(%first)",
        "%two = s32[]{:T(128)} constant(2)",
        "%init = (s32[]{:T(128)}, f32[8]{0:T(256)S(1)}, s32[]{:T(128)}) tuple(%copied, %p, /*index=2*/%two)",
        "%loop = (s32[], f32[8]{0}, s32[]) while(%init), condition=%cond, body=%body",
        computations=ADD + computations,
    )
    (found,) = collectives(text, MESH)
    assert (found.axis, found.count, found.count_known) == ("tp", turns or 1, turns is not None)


def test_a_fusion_that_keeps_a_slice_of_a_sum_is_a_reduce_scatter():
    """As TPU writes them; outside a fusion the sum is real."""
    lines = """  %r = f32[8]{0:T(256)} all-reduce(%a), channel_id=1, replica_groups={{0,2},{1,3}}, to_apply=%add
  %i = u32[] partition-id()
  ROOT %mine = f32[4]{0:T(256)} dynamic-slice(%r, %i), dynamic_slice_sizes={4}
}"""
    scatter = "%all-reduce-scatter.2 (a: f32[8]) -> f32[4] {\n  %a = f32[8]{0:T(256)} parameter(0)\n" + lines
    fusion = (
        '%s = f32[4]{0:T(256)} fusion(%p), kind=kCustom, calls=%all-reduce-scatter.2, metadata={op_name="jit(f)/dw"}'
    )
    (found,) = collectives(snippet("%p = f32[8]{0} parameter(0)", fusion, computations=f"{ADD}\n{scatter}"), MESH)
    assert summary([found]) == {("reduce-scatter", "fsdp", 1, 32)}
    plain = f"{ADD}\nENTRY %main (a: f32[8]) -> f32[4] {{\n  %a = f32[8]{{0}} parameter(0)\n{lines}"
    assert summary(collectives(plain, MESH)) == {("all-reduce", "fsdp", 1, 32)}


def test_a_gather_that_several_fusions_share_counts_once():
    """As TPU hides a gather behind matmuls: one fusion starts it, others carry it on, the last one waits."""
    gather = """%{name} (a: bf16[4,8]) -> bf16[8,8] {{
  %a = bf16[4,8]{{1,0:T(8,128)(2,1)S(1)}} parameter(0)
  ROOT %g = bf16[8,8]{{1,0:T(8,128)(2,1)}} all-gather(%a), channel_id=4, replica_groups=[2,2]<=[2,2]T(1,0), dimensions={{0}}, frontend_attributes={{chain_id="{chain}"}}
}}
"""
    parts = [("start", 0), ("carry.1", 0), ("carry.2", 0), ("done", 0), ("start.1", 1), ("done.1", 1)]
    fusions = [f"%f.{n} = bf16[8,8]{{1,0}} fusion(%p), kind=kCustom, calls=%{n}" for n, _ in parts]
    text = snippet(*fusions, computations="".join(gather.format(name=n, chain=chain) for n, chain in parts))
    found = collectives(text, MESH)
    assert [(c.kind, c.axis, c.num_bytes) for c in found] == [("all-gather", "fsdp", 128)] * 2


@pytest.mark.aot
@pytest.mark.parametrize("module, name", [("libtpu", "v5e-4"), ("jax_cuda12_plugin", "h100x4")])
def test_programs_for_absent_devices_are_read(module, name):
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed")
    from tunix_lite.parallel.mesh import make_mesh
    from tunix_lite.planning.hardware import devices_of, find_machine

    mesh = make_mesh(((2, 2), ("fsdp", "tp")), devices_of(find_machine(name)))
    L, B, D, F = 6, 1024, 512, 2048

    def gradient(w_LDF, x_BD):
        return jax.grad(lambda w_LDF: jnp.sum(jnp.square(layers(w_LDF, x_BD))))(w_LDF)

    # bfloat16, in which TPU multiplies: it would gather float32 in bfloat16, too
    spec, dtype = P(None, "fsdp", "tp"), jnp.bfloat16
    found = read(gradient, ((L, D, F), spec), ((B, D), P("fsdp", None)), mesh=mesh, out=spec, dtype=dtype)
    sums = {(group.kind, group.axis): group for group in grouped(found)}
    assert all((c.count, c.count_known) == (L, True) for c in found)
    weights = L * D * F // 2 * 2
    assert sums["all-gather", "fsdp"].total_bytes in (weights, 2 * weights)  # again for the way back, or kept
    assert weights <= sums["reduce-scatter", "fsdp"].total_bytes < 1.1 * weights  # each gradient once; TPU may pad
    assert sums["all-reduce", "tp"].total_bytes % (L * B // 2 * D * 2) == 0


def test_a_branch_may_not_be_taken():
    def branch(x_BD, y_BD):
        return jax.lax.cond(y_BD[0, 0] > 0, lambda x: constrained(x, P()), lambda x: constrained(x + 1, P()), x_BD)

    found = [c for c in read(branch, BATCH, ((ROWS, EMBED), P())) if c.kind == "all-gather"]
    assert found and {(c.axis, c.count, c.count_known) for c in found} == {("fsdp", 1, False)}
