//! The micro-kernel of AMX: a 32 × 32 tile of C as four tiles of 16 × 16 sums, fed by two tiles of A and two
//! of B (Intel SDM, volume 1, chapter 18, and `TDPBF16PS` in volume 2).
//!
//! A tile of A is 16 rows of 32 bf16; a tile of B is 16 pairs of rows of 16 columns, the pair side by side.
//! Inline assembly, because Rust has no stable intrinsics for the tiles.

use super::{kernel::MicroKernel, lanes::Bf16Pairs, pack::Order, store::Tile};

/// bf16 by AMX tiles.
pub(super) struct Tiles;

/// The operand of `ldtilecfg`: palette 1, eight tiles of 16 rows of 64 bytes.
#[repr(C, align(64))]
struct Configuration {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

static CONFIGURATION: Configuration = Configuration {
    palette: 1,
    start_row: 0,
    reserved: [0; 14],
    row_bytes: [64, 64, 64, 64, 64, 64, 64, 64, 0, 0, 0, 0, 0, 0, 0, 0],
    rows: [16, 16, 16, 16, 16, 16, 16, 16, 0, 0, 0, 0, 0, 0, 0, 0],
};

impl MicroKernel for Tiles {
    type Vector = Bf16Pairs;
    const ROWS: usize = 32;
    const COLUMNS: usize = 32;
    const DEPTH: usize = 16;
    const A_ORDER: Order = Order::AlongDepth;

    unsafe fn prepared<R>(work: impl FnOnce() -> R) -> R {
        // SAFETY: the CPU has tiles (the caller's promise); the configuration is a valid one, and nothing
        // else in the process uses tiles.
        unsafe {
            std::arch::asm!("ldtilecfg [{0}]", in(reg) &raw const CONFIGURATION, options(nostack, readonly));
        }
        let result = work();
        // SAFETY: as above.
        unsafe { std::arch::asm!("tilerelease", options(nostack, nomem)) };
        result
    }

    unsafe fn tile(depth: usize, a: *const u32, b: *const u32, tile: &mut Tile) {
        // SAFETY: the tiles are configured (the caller's promise). A step reads 2 KiB of each panel, which
        // hold `depth / 16` steps, and the four stores fill 32 rows of 128 bytes. No tile register is live
        // outside: the compiler uses none.
        unsafe {
            std::arch::asm!(
                "tilezero tmm0",
                "tilezero tmm1",
                "tilezero tmm2",
                "tilezero tmm3",
                "test {steps}, {steps}",
                "jz 3f",
                "2:",
                "tileloadd tmm4, [{a} + {a_stride}]",
                "tileloadd tmm6, [{b} + {b_stride}]",
                "tileloadd tmm7, [{b} + {b_stride} + 64]",
                "tileloadd tmm5, [{a} + {a_stride} + 1024]",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "add {a}, 2048",
                "add {b}, 2048",
                "dec {steps}",
                "jnz 2b",
                "3:",
                "tilestored [{c} + {b_stride}], tmm0",
                "tilestored [{c} + {b_stride} + 64], tmm1",
                "tilestored [{c} + {b_stride} + 2048], tmm2",
                "tilestored [{c} + {b_stride} + 2112], tmm3",
                a = inout(reg) a => _,
                b = inout(reg) b => _,
                steps = inout(reg) depth / Self::DEPTH => _,
                c = in(reg) tile.as_mut_ptr(),
                // Rows of a tile of A are packed one after the other; rows of B and C lie 32 units apart.
                a_stride = in(reg) 64_usize,
                b_stride = in(reg) 128_usize,
                options(nostack),
            );
        }
    }
}
