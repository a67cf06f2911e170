//! AMX emulation for tests on a CPU without it: a SIGILL handler executes the seven tile instructions of `amx`. So the
//! same machine code is tested everywhere. Each thread has its own tiles, as on the CPU.
//!
//! The CPU raises SIGILL at an instruction it lacks and passes its registers. The handler decodes the instruction
//! (Intel SDM, volume 2, sections 2.3 and 2.4), changes tiles or memory, and advances the instruction pointer past
//! it. Any other instruction gets the default action, which ends the process.

use std::{cell::UnsafeCell, sync::OnceLock};

use lockstep_tensor::{Arena, CpuLevel, CpuQueue};

/// A tile register: 16 rows of 64 bytes.
type TileRegister = [[u32; 16]; 16];

struct State {
    /// The configuration of `ldtilecfg`: bytes per row and rows of each tile; `None` when released.
    configuration: Option<[(usize, usize); 8]>,
    tiles: [TileRegister; 8],
}

thread_local! {
    static STATE: UnsafeCell<State> =
        const { UnsafeCell::new(State { configuration: None, tiles: [[[0; 16]; 16]; 8] }) };
}

/// Creates a queue with emulated AMX, if `level` is AMX and the CPU lacks nothing else of it.
pub(crate) fn queue(level: CpuLevel, threads: usize, arena: &Arena) -> Option<CpuQueue> {
    if level != CpuLevel::AmxBf16 || CpuLevel::detect() != CpuLevel::Avx512Bf16 || !install() {
        return None;
    }
    // SAFETY: the CPU executes AVX-512, and the handler the tile instructions.
    unsafe { CpuQueue::with_emulated_level(threads, arena, level) }.ok()
}

/// Installs the handler, once for the process. Returns true on success.
fn install() -> bool {
    static INSTALLED: OnceLock<bool> = OnceLock::new();
    *INSTALLED.get_or_init(|| {
        // SAFETY: an all-zero `sigaction` is a valid one; the handler has the signature that SA_SIGINFO asks for.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            let handler: extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void) = on_illegal_instruction;
            action.sa_sigaction = handler as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_NODEFER;
            libc::sigaction(libc::SIGILL, &raw const action, std::ptr::null_mut()) == 0
        }
    })
}

extern "C" fn on_illegal_instruction(_: i32, _: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the system passes the interrupted thread's registers as a `ucontext_t`. The instruction pointer is at
    // an instruction of our own code. The emulation changes only this thread's tiles and the memory that the
    // instruction names. An interrupted instruction holds no borrow of the tiles.
    unsafe {
        let registers = &mut (*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs;
        let pointer = registers[libc::REG_RIP as usize] as *const u8;
        match Instruction::decode(pointer, registers) {
            Some((instruction, length)) => {
                STATE.with(|state| instruction.execute(&mut *state.get()));
                registers[libc::REG_RIP as usize] += length as i64;
            }
            None => {
                libc::signal(libc::SIGILL, libc::SIG_DFL);
            }
        }
    }
}

/// The instructions of the micro-kernel.
enum Instruction {
    LoadConfiguration(*const u8),
    Release,
    Zero(usize),
    Load {
        tile: usize,
        base: *const u8,
        stride: isize,
    },
    Store {
        tile: usize,
        base: *mut u8,
        stride: isize,
    },
    DotBf16 {
        sums: usize,
        x: usize,
        y: usize,
    },
    /// Products of signed bytes of `x` and unsigned ones of `y`.
    DotInt8 {
        sums: usize,
        x: usize,
        y: usize,
    },
}

impl Instruction {
    /// Returns the instruction at `code` and its length in bytes; `None` if it is not emulated.
    ///
    /// # Safety
    /// `code` must point at an instruction.
    unsafe fn decode(code: *const u8, registers: &[libc::greg_t; 23]) -> Option<(Self, usize)> {
        // SAFETY: bytes are read one after the other, only as far as the earlier ones show that there are more.
        let byte = |index: usize| unsafe { *code.add(index) };
        // Three-byte VEX: C4, then R X B (inverted) and the opcode map, then W, vvvv (inverted), L, pp.
        if byte(0) != 0xc4 || byte(1) & 0x1f != 2 || byte(2) & 0x84 != 0 {
            return None;
        }
        let (extend_reg, extend_index, extend_base) = (
            usize::from(!byte(1) >> 7 & 1) * 8,
            usize::from(!byte(1) >> 6 & 1) * 8,
            usize::from(!byte(1) >> 5 & 1) * 8,
        );
        let vvvv = usize::from(!byte(2) >> 3 & 15);
        let (opcode, modrm) = (byte(3), byte(4));
        let (mode, reg, rm) = (modrm >> 6, usize::from(modrm >> 3 & 7) + extend_reg, usize::from(modrm & 7));
        let direct = match (opcode, byte(2) & 3, mode) {
            (0x49, 0, 3) => Some(Self::Release),
            (0x49, 3, 3) => Some(Self::Zero(reg)),
            (0x5c, 2, 3) => Some(Self::DotBf16 { sums: reg, x: rm + extend_base, y: vvvv }),
            (0x5e, 2, 3) => Some(Self::DotInt8 { sums: reg, x: rm + extend_base, y: vvvv }),
            _ => None,
        };
        if let Some(instruction) = direct {
            return Some((instruction, 5));
        }
        // A memory operand: [base + index + displacement]; there is an index only if a SIB byte follows.
        let (mut base, mut stride, mut length) = (rm + extend_base, 0, 5);
        if rm == 4 {
            let sib = byte(5);
            let index = usize::from(sib >> 3 & 7) + extend_index;
            base = usize::from(sib & 7) + extend_base;
            stride = if index == 4 { 0 } else { general(registers, index) << (sib >> 6) };
            length = 6;
        }
        if mode == 0 && base & 7 == 5 {
            return None; // RIP-relative or without a base: the kernel uses neither.
        }
        let mut address = general(registers, base);
        match mode {
            1 => address += isize::from(byte(length).cast_signed()),
            2 => {
                let bytes = std::array::from_fn(|i| byte(length + i));
                address += i32::from_le_bytes(bytes) as isize;
            }
            _ => {}
        }
        length += [0, 1, 4][usize::from(mode)];
        let instruction = match (opcode, byte(2) & 3) {
            (0x49, 0) => Self::LoadConfiguration((address + stride) as *const u8),
            (0x4b, 3) => Self::Load { tile: reg, base: address as *const u8, stride },
            (0x4b, 2) => Self::Store { tile: reg, base: address as *mut u8, stride },
            _ => return None,
        };
        Some((instruction, length))
    }

    /// Executes the instruction.
    ///
    /// # Safety
    /// Memory operands must be valid for it.
    unsafe fn execute(self, state: &mut State) {
        if let Self::LoadConfiguration(bytes) = self {
            // SAFETY: the operand is 64 bytes.
            let bytes = unsafe { bytes.cast::<[u8; 64]>().read_unaligned() };
            assert_eq!(bytes[..2], [1, 0], "palette and start row");
            let columns = |tile: usize| u16::from_le_bytes([bytes[16 + 2 * tile], bytes[17 + 2 * tile]]);
            let size = |tile| (usize::from(columns(tile)), usize::from(bytes[48 + tile]));
            state.configuration = Some(std::array::from_fn(size));
            return;
        }
        let configuration = state.configuration.expect("tiles are used after ldtilecfg only");
        match self {
            Self::LoadConfiguration(_) => {}
            Self::Release => {
                state.configuration = None;
                state.tiles = [[[0; 16]; 16]; 8];
            }
            Self::Zero(tile) => state.tiles[tile] = [[0; 16]; 16],
            Self::Load { tile, base, stride } => {
                let (row_bytes, rows) = configuration[tile];
                state.tiles[tile] = [[0; 16]; 16];
                for (i, row) in state.tiles[tile].iter_mut().take(rows).enumerate() {
                    // SAFETY: the caller's promise.
                    unsafe {
                        let from = base.offset(i as isize * stride);
                        from.copy_to_nonoverlapping(row.as_mut_ptr().cast(), row_bytes);
                    }
                }
            }
            Self::Store { tile, base, stride } => {
                let (row_bytes, rows) = configuration[tile];
                for (i, row) in state.tiles[tile].iter().take(rows).enumerate() {
                    // SAFETY: the caller's promise.
                    unsafe {
                        let to = base.offset(i as isize * stride);
                        to.copy_from_nonoverlapping(row.as_ptr().cast(), row_bytes);
                    }
                }
            }
            Self::DotInt8 { sums, x, y } => {
                check_sizes(&configuration, [sums, x, y]);
                // Words beyond the sizes of tiles are zeros.
                let (x, y) = (state.tiles[x], state.tiles[y]);
                for (sums, x) in state.tiles[sums].iter_mut().zip(x) {
                    for (x, y) in x.into_iter().zip(y) {
                        for (sum, y) in sums.iter_mut().zip(y) {
                            let bytes = x.to_le_bytes().into_iter().zip(y.to_le_bytes());
                            let products = bytes.map(|(x, y)| i32::from(x.cast_signed()) * i32::from(y));
                            *sum = sum.wrapping_add_signed(products.sum());
                        }
                    }
                }
            }
            Self::DotBf16 { sums, x, y } => {
                check_sizes(&configuration, [sums, x, y]);
                // Words beyond the sizes of tiles are zeros. The products of even and of odd elements are summed separately,
                // then together, then added.
                let (x, y) = (state.tiles[x], state.tiles[y]);
                for (sums, x) in state.tiles[sums].iter_mut().zip(x) {
                    let (mut even, mut odd) = ([0.0; 16], [0.0; 16]);
                    for (x, y) in x.into_iter().zip(y) {
                        for (column, y) in y.into_iter().enumerate() {
                            even[column] = normal(half(x).mul_add(half(y), even[column]));
                            odd[column] = normal(half(x >> 16).mul_add(half(y >> 16), odd[column]));
                        }
                    }
                    for (sum, (even, odd)) in sums.iter_mut().zip(even.into_iter().zip(odd)) {
                        *sum = normal(f32::from_bits(*sum) + normal(even + odd)).to_bits();
                    }
                }
            }
        }
    }
}

/// Checks that the sizes of the tiles of a product agree: of the sums, of the left and of the right operand.
fn check_sizes(configuration: &[(usize, usize); 8], [sums, x, y]: [usize; 3]) {
    let ((x_bytes, x_rows), (y_bytes, y_rows)) = (configuration[x], configuration[y]);
    assert_eq!(x_bytes, 4 * y_rows, "depths of the tiles: {configuration:?}");
    assert_eq!(configuration[sums], (y_bytes, x_rows), "tile of sums: {configuration:?}");
}

/// Returns the bf16 in the lower half of a unit.
fn half(unit: u32) -> f32 {
    normal(f32::from_bits(unit << 16))
}

/// Flushes subnormal numbers to zero.
fn normal(x: f32) -> f32 {
    if x.is_subnormal() { 0.0 } else { x }
}

/// Returns a general-purpose register by its number in instructions.
fn general(registers: &[libc::greg_t; 23], number: usize) -> isize {
    use libc::*;
    let order = [
        REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI, REG_R8, REG_R9, REG_R10,
        REG_R11, REG_R12, REG_R13, REG_R14, REG_R15,
    ];
    registers[order[number] as usize] as isize
}
