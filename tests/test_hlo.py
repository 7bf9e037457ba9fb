"""What is counted in optimised HLO: loops by their trips, slices by what they take, collectives by their groups."""

import jax
import jax.numpy as jnp
import pytest

from kernels.hlo import Roofline, Work, roofline, work
from kernels.topology import CHIPS

MODULE = """HloModule step, is_scheduled=true

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

%fused_write (whole: f32[10,8], row: f32[8], at: s32[]) -> f32[10,8] {
  %whole = f32[10,8]{1,0} parameter(0)
  %row = f32[8]{0} parameter(1)
  %at = s32[] parameter(2)
  %flat = f32[1,8]{1,0} bitcast(%row)
  ROOT %written = f32[10,8]{1,0} dynamic-update-slice(%whole, %flat, %at, %at)
}

%fused_read (whole.1: f32[10,8], at.1: s32[]) -> bf16[1,8] {
  %whole.1 = f32[10,8]{1,0} parameter(0)
  %at.1 = s32[] parameter(1)
  %row.1 = f32[1,8]{1,0} dynamic-slice(%whole.1, %at.1, %at.1), dynamic_slice_sizes={1,8}
  ROOT %short = bf16[1,8]{1,0} convert(%row.1)
}

%body (carry: (s32[], f32[8], f32[10,8])) -> (s32[], f32[8], f32[10,8]) {
  %carry = (s32[], f32[8]{0}, /*index=2*/f32[10,8]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%carry), index=0
  %v = f32[8]{0} get-tuple-element(%carry), index=1
  %kept = f32[10,8]{1,0} get-tuple-element(%carry), index=2
  BODY
  ROOT %next = (s32[], f32[8]{0}, f32[10,8]{1,0}) tuple(%i, %v, %kept)
}

%condition (carry.1: (s32[], f32[8], f32[10,8])) -> pred[] {
  %carry.1 = (s32[], f32[8]{0}, f32[10,8]{1,0}) parameter(0)
  ROOT %more = pred[] constant(true)
}

ENTRY %main (start: (s32[], f32[8], f32[10,8])) -> (s32[], f32[8], f32[10,8]) {
  %start = (s32[], f32[8]{0}, f32[10,8]{1,0}) parameter(0)
  ROOT %loop = (s32[], f32[8]{0}, f32[10,8]{1,0}) while(%start), condition=%condition, body=%bodyLOOP
}
"""


def counted(body, loop=', backend_config={"known_trip_count":{"n":"6"}}', **trips):
    return work(MODULE.replace("BODY", body).replace("LOOP", loop), trips)


@pytest.mark.parametrize(
    ("body", "each"),
    [
        ("%w = f32[10,8]{1,0} fusion(%kept, %v, %i), kind=kLoop, calls=%fused_write", 2 * 32 + 4),
        ("%r = bf16[1,8]{1,0} fusion(%kept, %i), kind=kLoop, calls=%fused_read", 32 + 4 + 16),
        ("%c = f32[10,8]{1,0} copy(%kept)", 2 * 320),
        ("%w = f32[10,8]{1,0} scatter(%kept, %i, %v), to_apply=%add", 2 * 32),
        ("%s = f32[1,8]{1,0} dynamic-slice(%kept, %i, %i), dynamic_slice_sizes={1,8}", 2 * 32),
    ],
    ids=["update in place", "slice in a fusion", "copy", "scatter", "slice"],
)
def test_traffic_is_what_each_trip_reads_and_writes(body, each):
    """Six trips; an array that is only sliced, or updated in place, counts as the slice."""
    assert counted(body).bytes == 6 * each


def test_a_loop_of_unknown_length_runs_as_often_as_its_scope_is_said_to():
    """And one of which nothing is said is refused."""
    copy, loop = "%c = f32[10,8]{1,0} copy(%kept)", ', metadata={op_name="jit(step)/jvp(logits)/while"}'
    assert counted(copy, loop, experts=2, logits=3).bytes == 3 * 640
    with pytest.raises(ValueError, match=r"loop loop runs is not known; its scopes are jit step jvp logits while"):
        counted(copy, loop, experts=2)


@pytest.mark.parametrize(
    ("line", "kind", "sent"),
    [
        ("%g = (f32[8], f32[32]{0}) all-gather-start(%v), replica_groups=[2,4]<=[8], dimensions={0}", "all-gather", 96),
        ("%g = f32[8]{0} all-reduce(%v), replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add", "all-reduce", 48),
        ("%g = ((f32[8]{0}), f32[2]{0}) reduce-scatter-start(%v), replica_groups=mesh['a'=2,'b'=4] {'b'}, "
         "to_apply=%add", "reduce-scatter", 24),
        ("%g = f32[8]{0} all-to-all(%v), replica_groups=mesh['a'=8] {'a':(1)4}, dimensions={0}", "all-to-all", 24),
        ("%g = f32[8]{0} collective-permute(%v), source_target_pairs={{0,1},{1,0}}", "collective-permute", 32),
    ],
)  # fmt: skip
def test_collectives_count_what_a_device_sends_to_the_others_of_its_group(line, kind, sent):
    """32 bytes a device, in rings of four, in each of six trips."""
    result = counted(line)
    assert result.counts == {kind: 6} and result.moved == {kind: 6 * sent}


def test_products_count_in_loops_that_xla_compiled_itself():
    """Two FLOPs a multiply-add, a batched and a plain product in each of 5 * 7 trips; XLA's own analysis has one."""

    def inner(x, _):
        x = jnp.einsum("bij,bjk->bik", x, x)
        return x + (x[0] @ x[1])[None], None

    def outer(x, _):
        return jnp.sin(jax.lax.scan(inner, x, length=7)[0]), None

    compiled = jax.jit(lambda x: jax.lax.scan(outer, x, length=5)[0]).lower(jnp.zeros((2, 32, 32))).compile()
    assert work(compiled.as_text(), {}).flops == {"f32": 5 * 7 * 3 * 2 * 32**3}


def test_the_least_time_is_of_the_slowest_of_products_memory_and_links():
    """Products of float32 at half the speed of bfloat16's."""
    times = roofline(
        Work({"bf16": 989e12, "f32": 989e12}, 3.35232e12, {"all-gather": 9}, {"all-gather": 45e9}), CHIPS["h100"]
    )
    assert times == pytest.approx(Roofline(compute=3.0, memory=1.0, collectives=0.1))
    assert times.overlapped == pytest.approx(3.0) and times.in_turn == pytest.approx(4.1)


def test_text_that_is_no_module_is_refused():
    with pytest.raises(ValueError, match="no ENTRY"):
        work("HloModule nothing\n", {})
