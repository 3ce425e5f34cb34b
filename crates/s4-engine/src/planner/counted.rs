//! Symbol counts of a sample's planes, made once for each plane.

use std::sync::Arc;

use s4_codec_cpu::rans::{Counts, entropy};

// Thresholds are parts of the compared quantities: 128 means one in 128.

/// In planes of at least this many bytes, one block in [`PARTS`] may show that all is noise, as most mantissas are.
const COARSE: usize = 8192;
const BLOCK: usize = 256;
const PARTS: usize = 4;
/// Such a partial count shows noise only if coding saves less than this part, far less than what a plane must save to
/// be coded.
const SURE_NOISE: u64 = 128;

/// The symbol counts of a plane.
#[derive(Debug)]
pub(super) struct CountedPlane {
    /// For noise, possibly counted in a part of the plane only.
    pub(super) counts: Counts,
    /// The entropy of the plane, in bits; for noise, its raw size.
    pub(super) least: u64,
}

impl CountedPlane {
    /// Counts a plane whose symbols have `bits` bits.
    fn of(plane: &[u8], bits: u64) -> Self {
        let mut counts = Counts::new();
        if plane.len() < COARSE {
            counts.add_pieces(std::iter::once(plane));
        } else {
            let blocks = |first| plane.chunks(BLOCK).skip(first).step_by(PARTS);
            counts.add_pieces(blocks(0));
            let raw = bits * counts.total();
            if entropy(&counts) + unseen(&counts) >= raw - raw / SURE_NOISE {
                return Self { counts: counts.partial(), least: bits * plane.len() as u64 };
            }
            counts.add_pieces((1..PARTS).flat_map(blocks));
        }
        let least = entropy(&counts);
        Self { counts, least }
    }
}

/// The number of different symbols.
pub(super) fn symbols_of(counts: &Counts) -> usize {
    (0..=255).filter(|s| counts.get(*s) > 0).count()
}

/// Bits that a table seems to save, and does not, because it is made from the sample's own counts:
/// with many tables it adds up. For independent frequencies it is 0.7 bits each (G. A. Miller,
/// "Note on the bias of information estimates", 1955). Those of residuals depend on each other, and
/// on the files of `docs/ratio.md` half a bit predicted best which plan is smaller.
pub(super) fn unseen(counts: &Counts) -> u64 {
    (symbols_of(counts) as u64).saturating_sub(1) / 2
}

/// The counts of a tensor's planes: layouts, and ways to store a sample, have planes in common.
#[derive(Debug, Default)]
pub(crate) struct Counted {
    planes: Vec<Known>,
    /// Number of entries that belong to the tensor; the others are memory to use again.
    used: usize,
}

#[derive(Debug)]
struct Known {
    plane: Vec<u8>,
    /// Bits of a symbol.
    bits: u64,
    counted: Arc<CountedPlane>,
}

impl Counted {
    /// Forgets all planes: the next ones are of another tensor.
    pub(crate) fn clear(&mut self) {
        self.used = 0;
    }

    /// The counts of a plane whose symbols have `bits` bits.
    pub(super) fn plane(&mut self, plane: &[u8], bits: u64) -> Arc<CountedPlane> {
        let mut known = self.planes[..self.used].iter();
        if let Some(known) = known.find(|k| k.bits == bits && k.plane == plane) {
            return Arc::clone(&known.counted);
        }
        let counted = Arc::new(CountedPlane::of(plane, bits));
        let new = Arc::clone(&counted);
        match self.planes.get_mut(self.used) {
            Some(old) => {
                old.plane.clear();
                old.plane.extend_from_slice(plane);
                (old.bits, old.counted) = (bits, new);
            }
            None => self.planes.push(Known { plane: plane.to_vec(), bits, counted: new }),
        }
        self.used += 1;
        counted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes that look like noise.
    fn noise(len: usize, seed: u32) -> Vec<u8> {
        let mut x = seed | 1;
        let next = |_| {
            x = x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (x >> 24) as u8
        };
        (0..len).map(next).collect()
    }

    #[test]
    fn a_plane_is_counted_once_for_each_tensor() {
        let mut counted = Counted::default();
        let planes: Vec<_> = (0..5).map(|i| noise(100 - i as usize, i << 8)).collect();
        let first = counted.plane(&planes[0], 8);
        assert!(Arc::ptr_eq(&first, &counted.plane(&planes[0].clone(), 8)));
        // The same bytes as symbols of fewer bits are another plane.
        assert!(!Arc::ptr_eq(&first, &counted.plane(&planes[0], 7)));
        for _ in 0..2 {
            for plane in planes.iter().rev() {
                assert_eq!(counted.plane(plane, 8).counts, Counts::of_all(plane));
            }
            counted.clear();
        }
        let again = counted.plane(&planes[0], 8);
        assert!(!Arc::ptr_eq(&first, &again) && first.counts == again.counts);
        // The memory of the tensor before is used again.
        assert_eq!(counted.planes.len(), 1 + planes.len());
    }

    #[test]
    fn a_part_of_a_plane_shows_noise_and_nothing_else() {
        let plane = noise(4 * COARSE, 7);
        let counted = CountedPlane::of(&plane, 8);
        assert_eq!((counted.counts.total(), counted.least), (COARSE as u64, 8 * 4 * COARSE as u64));
        // One bit of eight is constant, so the rest is counted, too.
        let bits: Vec<u8> = plane.iter().map(|b| b & 0x7f).collect();
        let counted = CountedPlane::of(&bits, 8);
        assert_eq!(counted.counts, Counts::of_all(&bits));
        assert!(counted.least <= 7 * bits.len() as u64);
        let short = CountedPlane::of(&plane[..COARSE - 1], 8);
        assert_eq!(short.counts.total(), COARSE as u64 - 1);
    }
}
