//! Mutations of valid inputs: a pure function of the seeds and the mutant's number, so that both identify a failure.

use lockstep_plan::random::Draws;

/// Numbers at the limits of integer and float types, at which parsers tend to fail.
const NUMBERS: [&str; 12] = [
    "0",
    "-1",
    "1e308",
    "1e-400",
    "4294967296",
    "9223372036854775807",
    "9223372036854775808",
    "18446744073709551615",
    "18446744073709551616",
    "0.5",
    "-0",
    "1e999",
];

/// Returns mutant number `number`: one of `seeds` with up to four random changes, some of which insert one of `words`.
///
/// # Panics
/// If there are no seeds.
pub fn mutant(seeds: &[Vec<u8>], words: &[&str], number: u64) -> Vec<u8> {
    let mut choice = Draws::new(number);
    let mut bytes = seeds[choice.below(seeds.len())].clone();
    for _ in 0..1 + choice.below(4) {
        change(&mut bytes, seeds, words, &mut choice);
    }
    bytes
}

/// Returns a short random range within `0..len`.
fn range(choice: &mut Draws, len: usize) -> std::ops::Range<usize> {
    let start = choice.below(len + 1);
    let longest = 1 << choice.below(8);
    start..len.min(start + choice.below(longest + 1))
}

fn change(bytes: &mut Vec<u8>, seeds: &[Vec<u8>], words: &[&str], choice: &mut Draws) {
    let at = choice.below(bytes.len());
    match choice.below(10) {
        0 if !bytes.is_empty() => bytes[at] ^= 1 << choice.below(8),
        1 if !bytes.is_empty() => bytes[at] = choice.below(256) as u8,
        2 => bytes.truncate(at),
        3 => drop(bytes.drain(range(choice, bytes.len()))),
        4 => {
            let copied = bytes[range(choice, bytes.len())].to_vec();
            bytes.splice(at..at, copied);
        }
        // Replaces a range by a range of another seed.
        5 => {
            let other = &seeds[choice.below(seeds.len())];
            let piece = other[range(choice, other.len())].to_vec();
            bytes.splice(range(choice, bytes.len()), piece);
        }
        6 if !words.is_empty() => {
            let word = words[choice.below(words.len())];
            bytes.splice(at..at, word.bytes());
        }
        // Replaces eight bytes at once, the size of a length field.
        7 if bytes.len() >= 8 => {
            let at = choice.below(bytes.len() - 7);
            let value =
                [0, 1, u64::MAX, u64::MAX / 2, 1 << 32, 1 << 63, 8, bytes.len() as u64][choice.below(8)];
            bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
        }
        // Replaces a decimal number by another one.
        _ => {
            let Some(start) = (at..bytes.len()).find(|&at| bytes[at].is_ascii_digit()) else { return };
            let end = (start..bytes.len()).find(|&at| !bytes[at].is_ascii_digit()).unwrap_or(bytes.len());
            bytes.splice(start..end, NUMBERS[choice.below(NUMBERS.len())].bytes());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mutants_follow_from_their_number_and_differ() {
        let seeds = [b"{\"shape\": [2, 3]}".to_vec(), b"[0, 1]".to_vec()];
        let all: Vec<Vec<u8>> = (0..500).map(|number| mutant(&seeds, &["null"], number)).collect();
        assert_eq!(all[7], mutant(&seeds, &["null"], 7));
        let distinct: std::collections::HashSet<&Vec<u8>> = all.iter().collect();
        assert!(distinct.len() > 300, "{} of 500 are distinct", distinct.len());
        assert!(all.iter().any(|mutant| mutant.windows(4).any(|window| window == b"null")));
    }
}
