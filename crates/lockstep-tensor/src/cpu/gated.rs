//! Gated activations of feed-forward layers: `y = f(gate) · up`, elementwise.

use super::{
    CpuQueue,
    map::map,
    operands::{check_disjoint, expect},
    simd::{inlined, normal_distribution, sigmoid, tanh_gate, with_float},
};
use crate::{GatedActivation, Gelu, View};

pub(super) fn gated(queue: &CpuQueue, kind: GatedActivation, [gate, up]: [View<'_>; 2], y: View<'_>) {
    expect("gated: up", up, gate.dtype(), gate.elements());
    expect("gated: y", y, gate.dtype(), gate.elements());
    check_disjoint(&[y], &[gate, up]);
    let (inputs, y) = ([gate, up], [y]);
    with_float!(gate.dtype(), T => match kind {
        GatedActivation::Silu => {
            map::<T, 2, 1>(queue, inputs, y, inlined!(|isa, [gate, up]| [gate * sigmoid(isa, gate) * up]));
        }
        GatedActivation::Gelu(Gelu::Exact) => map::<T, 2, 1>(queue, inputs, y, inlined!(|isa, [gate, up]| {
            [gate * normal_distribution(isa, gate).0 * up]
        })),
        GatedActivation::Gelu(Gelu::Tanh) => {
            map::<T, 2, 1>(queue, inputs, y, inlined!(|isa, [gate, up]| [gate * tanh_gate(isa, gate).0 * up]));
        }
        GatedActivation::Clamped { slope, limit } => map::<T, 2, 1>(queue, inputs, y, inlined!(|isa, [gate, up]| {
            let (gate, up) = (at_most(limit, gate), clamped(limit, up));
            [gate * sigmoid(isa, slope * gate) * (up + 1.0)]
        })),
    });
}

pub(super) fn gated_backward(
    queue: &CpuQueue,
    kind: GatedActivation,
    dy: View<'_>,
    [gate, up]: [View<'_>; 2],
    [dgate, dup]: [View<'_>; 2],
) {
    let operands = [("gate", gate), ("up", up), ("dgate", dgate), ("dup", dup)];
    for (name, operand) in operands {
        expect(format_args!("gated_backward: {name}"), operand, dy.dtype(), dy.elements());
    }
    check_disjoint(&[dgate, dup], &[dy, gate, up]);
    let (inputs, outputs) = ([dy, gate, up], [dgate, dup]);
    with_float!(dy.dtype(), T => match kind {
        GatedActivation::Silu => map::<T, 3, 2>(queue, inputs, outputs, inlined!(|isa, [dy, gate, up]| {
            let s = sigmoid(isa, gate);
            // d(g s(g))/dg = s + g s (1 - s)
            [dy * up * (s + gate * s * (1.0 - s)), dy * gate * s]
        })),
        GatedActivation::Gelu(Gelu::Exact) => {
            map::<T, 3, 2>(queue, inputs, outputs, inlined!(|isa, [dy, gate, up]| {
                let (probability, density) = normal_distribution(isa, gate);
                [dy * up * (probability + gate * density), dy * gate * probability]
            }));
        }
        GatedActivation::Gelu(Gelu::Tanh) => {
            map::<T, 3, 2>(queue, inputs, outputs, inlined!(|isa, [dy, gate, up]| {
                let (s, slope) = tanh_gate(isa, gate);
                [dy * up * (s + gate * slope), dy * gate * s]
            }));
        }
        GatedActivation::Clamped { slope, limit } => {
            map::<T, 3, 2>(queue, inputs, outputs, inlined!(|isa, [dy, gate, up]| {
                let (bounded, factor) = (at_most(limit, gate), clamped(limit, up) + 1.0);
                let s = sigmoid(isa, slope * bounded);
                // d(g s(a g))/dg = s + a g s (1 - s). Beyond a limit the output is constant.
                let dgate = dy * factor * (s + slope * bounded * s * (1.0 - s));
                let dup = dy * bounded * s;
                [if gate > limit { 0.0 } else { dgate }, if up.abs() > limit { 0.0 } else { dup }]
            }));
        }
    });
}

/// Returns `min(x, limit)`; NaN passes through.
#[inline(always)]
fn at_most(limit: f32, x: f32) -> f32 {
    if x > limit { limit } else { x }
}

/// Returns `x` clamped to `-limit..=limit`; NaN passes through.
#[inline(always)]
fn clamped(limit: f32, x: f32) -> f32 {
    let x = at_most(limit, x);
    if x < -limit { -limit } else { x }
}
