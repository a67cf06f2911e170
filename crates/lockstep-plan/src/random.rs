//! Counter-based random numbers: a value is a function of (key, counter), so ranks need no shared state
//! and no number depends on how the work is split.
//!
//! The generator is Philox4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC'11).
//! Normals go through `libm`, which gives the same bits on every CPU.

/// Philox4x32 with ten rounds under one 64-bit key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Philox {
    key: [u32; 2],
}

impl Philox {
    /// Multipliers of a round.
    pub const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
    /// Increments of the key after a round.
    pub const WEYL: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];

    /// Creates a generator for `key`.
    pub const fn new(key: u64) -> Self {
        Self { key: [key as u32, (key >> 32) as u32] }
    }

    /// Returns the four 32-bit words at `counter`.
    #[inline(always)]
    pub const fn block(self, counter: [u32; 4]) -> [u32; 4] {
        let [mut c0, mut c1, mut c2, mut c3] = counter;
        let [mut k0, mut k1] = self.key;
        let mut round = 0;
        while round < 10 {
            let p0 = Self::MULTIPLIERS[0] as u64 * c0 as u64;
            let p1 = Self::MULTIPLIERS[1] as u64 * c2 as u64;
            (c0, c1, c2, c3) =
                ((p1 >> 32) as u32 ^ c1 ^ k0, p1 as u32, (p0 >> 32) as u32 ^ c3 ^ k1, p0 as u32);
            k0 = k0.wrapping_add(Self::WEYL[0]);
            k1 = k1.wrapping_add(Self::WEYL[1]);
            round += 1;
        }
        [c0, c1, c2, c3]
    }

    /// Returns the block at a 64-bit counter.
    #[inline(always)]
    pub const fn at(self, counter: u64) -> [u32; 4] {
        self.block([counter as u32, (counter >> 32) as u32, 0, 0])
    }

    /// Returns the two independent standard normal numbers at a 64-bit counter (Box-Muller).
    pub fn normals(self, counter: u64) -> [f32; 2] {
        let words = self.at(counter);
        // 53 random bits in (0, 1]: the logarithm below stays finite.
        let radius_uniform =
            (((u64::from(words[0]) << 21) ^ u64::from(words[1] >> 11)) as f64 + 1.0) / (1u64 << 53) as f64;
        let angle = std::f64::consts::TAU * f64::from(words[2]) / (1u64 << 32) as f64;
        let radius = libm::sqrt(-2.0 * libm::log(radius_uniform));
        let (sine, cosine) = libm::sincos(angle);
        [(radius * cosine) as f32, (radius * sine) as f32]
    }

    /// Returns the standard normal number with index `element`.
    pub fn normal(self, element: u64) -> f32 {
        self.normals(element / 2)[(element % 2) as usize]
    }

    /// Returns a number in `[0, 1)` with 53 random bits.
    pub fn uniform(self, counter: u64) -> f64 {
        let words = self.at(counter);
        ((u64::from(words[0]) << 21) ^ u64::from(words[1] >> 11)) as f64 / (1u64 << 53) as f64
    }
}

/// A sequence of random choices, determined by a seed.
#[derive(Debug, Clone)]
pub struct Draws {
    philox: Philox,
    drawn: u64,
}

impl Draws {
    /// Creates the sequence of `seed`.
    pub const fn new(seed: u64) -> Self {
        Self { philox: Philox::new(seed), drawn: 0 }
    }

    /// Draws a number in `0..end`; 0 if `end` is 0. `end` must be far below 2^32, so that the bias of the remainder does not matter.
    pub const fn below(&mut self, end: usize) -> usize {
        self.drawn += 1;
        let end = if end == 0 { 1 } else { end };
        self.philox.at(self.drawn)[0] as usize % end
    }

    /// Draws one of `all`.
    ///
    /// # Panics
    /// If `all` is empty.
    pub const fn of<T: Copy>(&mut self, all: &[T]) -> T {
        all[self.below(all.len())]
    }
}

/// Returns a 64-bit key for a name (FNV-1a, then a finalizer that spreads every input bit).
pub const fn key_from_name(name: &str) -> u64 {
    let bytes = name.as_bytes();
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    let mut i = 0;
    while i < bytes.len() {
        hash = (hash ^ bytes[i] as u64).wrapping_mul(0x0000_0100_0000_01b3);
        i += 1;
    }
    mix(hash)
}

/// Maps 64-bit words one-to-one so that every input bit reaches every output bit (SplitMix64's finalizer).
pub const fn mix(mut word: u64) -> u64 {
    word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    word ^ (word >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The known-answer vectors published with Random123 (kat_vectors, philox4x32 10).
    #[test]
    fn philox_gives_the_published_vectors() {
        assert_eq!(Philox::new(0).block([0; 4]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(
            Philox::new(u64::MAX).block([u32::MAX; 4]),
            [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]
        );
        assert_eq!(
            Philox::new(0x299f_31d0_a409_3822).block([0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344]),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }

    #[test]
    fn normals_have_mean_zero_and_variance_one() {
        let philox = Philox::new(7);
        let n = 200_000;
        let (mut sum, mut squares, mut fourth) = (0.0, 0.0, 0.0);
        for i in 0..n {
            let x = f64::from(philox.normal(i));
            sum += x;
            squares += x * x;
            fourth += x * x * x * x;
        }
        let n = n as f64;
        assert!((sum / n).abs() < 0.01, "mean {}", sum / n);
        assert!((squares / n - 1.0).abs() < 0.02, "variance {}", squares / n);
        assert!((fourth / n - 3.0).abs() < 0.1, "fourth moment {}", fourth / n);
    }
}
