//! Changes to an input, and what makes its checksums right again.

use rand::RngExt;
use rand::rngs::StdRng;

/// Numbers that lie at the edges of what fields hold.
const EDGES: [u64; 14] =
    [0, 1, 7, 8, 255, 511, 512, 4095, 4096, 65536, 0x7fff_ffff, 0xffff_ffff, 1 << 59, u64::MAX];

/// One to eight changes; `other` is an input to take pieces from.
pub fn mutate(input: &mut Vec<u8>, other: &[u8], rng: &mut StdRng) {
    for _ in 0..rng.random_range(1..=8) {
        if input.is_empty() {
            input.push(0);
        }
        let at = place(input.len(), rng);
        match rng.random_range(0..9) {
            0 => input[at] ^= 1 << rng.random_range(0..8),
            1 => input[at] = rng.random(),
            2..4 => put(input, at, &edge(rng).to_le_bytes()[..1 << rng.random_range(0..4)]),
            4 => {
                let old = input[at];
                input[at] = old.wrapping_add(rng.random_range(0..16)).wrapping_sub(8);
            }
            5 => input.truncate(at),
            6 => {
                let len = rng.random_range(0..=(input.len() - at).min(600));
                let piece = input[at..at + len].to_vec();
                let to = place(input.len(), rng);
                put(input, to, &piece);
            }
            7 => {
                let from = place(other.len(), rng);
                let len = rng.random_range(0..=(other.len() - from).min(5000));
                put(input, at, &other[from..from + len]);
            }
            _ => {
                let piece = vec![0; rng.random_range(1..700)];
                input.splice(at..at, piece);
            }
        }
    }
}

/// Anywhere, with a preference for both ends, where headers, indexes and trailers lie.
fn place(len: usize, rng: &mut StdRng) -> usize {
    let near = [len, 200.min(len), 700.min(len)][rng.random_range(0..3)].max(1);
    let from_start = rng.random_range(0..near);
    if rng.random() { from_start } else { len.saturating_sub(1 + from_start) }
}

fn edge(rng: &mut StdRng) -> u64 {
    let edge = EDGES[rng.random_range(0..EDGES.len())];
    if rng.random_bool(0.1) { edge << rng.random_range(0..32) } else { edge }
}

fn put(input: &mut [u8], at: usize, bytes: &[u8]) {
    let len = bytes.len().min(input.len().saturating_sub(at));
    input[at..at + len].copy_from_slice(&bytes[..len]);
}

/// ZFile's checksum.
fn checksum(bytes: &[u8]) -> u32 {
    !crc32c::crc32c_append(!0, bytes)
}

/// The digests of header and trailer, and the jump table's checksum where the trailer finds one.
pub fn repair_zfile(input: &mut [u8]) {
    let len = input.len();
    if len < 512 {
        return;
    }
    for at in [0, len - 512] {
        let field = |from: usize| {
            u64::from_le_bytes(input[at + from..at + from + 8].try_into().expect("eight bytes"))
        };
        let table = usize::try_from(field(40)).ok().zip(usize::try_from(field(48)).ok());
        let table = table.and_then(|(from, count)| input.get(from..from.checked_add(count.checked_mul(4)?)?));
        if let Some(crc) = table.map(checksum) {
            input[at + 64..at + 68].copy_from_slice(&crc.to_le_bytes());
        }
        input[at + 28..at + 32].fill(0);
        let digest = checksum(&input[at..at + 512]);
        input[at + 28..at + 32].copy_from_slice(&digest.to_le_bytes());
    }
}

/// The checksums of the headers that lie where the seeds have theirs.
pub fn repair_tar(input: &mut [u8]) {
    for at in [0, 1024] {
        let Some(block) = input.get_mut(at..at + 512) else { return };
        block[148..156].fill(b' ');
        let sum: u32 = block.iter().map(|&byte| u32::from(byte)).sum();
        block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    }
}
