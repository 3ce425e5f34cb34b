//! BLAKE3 of bytes that come piece by piece, by several threads even if the pieces consist of small
//! slices.
//!
//! [`blake3::Hasher`] divides one slice among threads, but not several slices. Here each thread
//! hashes whole subtrees of the hash's tree (section 2.1 of the BLAKE3 paper), whatever slices
//! their bytes are in.

use blake3::hazmat::{
    ChainingValue, HasherExt, Mode, merge_subtrees_non_root, merge_subtrees_root,
};
use rayon::prelude::*;

/// Bytes of a subtree, which one thread hashes: a power of two, as the tree's are.
const SUBTREE: usize = 128 << 10;

/// Hashes as [`blake3::Hasher`] does.
#[derive(Default)]
pub(crate) struct TreeHasher {
    /// Chaining values of the complete subtrees before the open one, merged as far as possible: one
    /// for each bit that is set in `count`, the largest first.
    complete: Vec<ChainingValue>,
    /// Number of subtrees that are complete.
    count: u64,
    /// The last subtree, which is open until more bytes follow it: the last one of all is hashed differently.
    open: Box<blake3::Hasher>,
    /// Bytes of the open one.
    len: usize,
}

impl TreeHasher {
    /// Adds bytes.
    pub(crate) fn update(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            if self.len == SUBTREE {
                self.open_next(Box::new(Self::subtree(self.count + 1)), 0);
            }
            let (now, later) = bytes.split_at(bytes.len().min(SUBTREE - self.len));
            self.open.update(now);
            self.len += now.len();
            bytes = later;
        }
    }

    /// Adds slices, one behind the other, with the threads of the pool that this is called in.
    pub(crate) fn update_in_pool(&mut self, slices: &[&[u8]]) {
        let mut starts = Vec::with_capacity(slices.len());
        let mut len = 0;
        for slice in slices {
            starts.push(len);
            len += slice.len();
        }
        let parts = |first: usize, len: usize| {
            let from = starts.partition_point(|start| *start <= first).saturating_sub(1);
            let slices = slices[from..].iter().zip(&starts[from..]);
            slices.map_while(move |(slice, &start)| {
                let end = (first + len).saturating_sub(start).min(slice.len());
                (start < first + len).then(|| &slice[first.saturating_sub(start).min(end)..end])
            })
        };
        let head = len.min(SUBTREE - self.len);
        parts(0, head).for_each(|part| self.update(part));
        let (first, count) = (self.count + 1, (len - head).div_ceil(SUBTREE));
        let hash = |i: usize| {
            let mut subtree = Self::subtree(first + i as u64);
            let at = head + i * SUBTREE;
            parts(at, SUBTREE).for_each(|part| {
                subtree.update(part);
            });
            // All but the last subtree are known to be followed by more bytes.
            if i + 1 < count { Ok(subtree.finalize_non_root()) } else { Err(Box::new(subtree)) }
        };
        let hashed: Vec<_> = (0..count).into_par_iter().with_max_len(1).map(hash).collect();
        for subtree in hashed {
            match subtree {
                Ok(value) if self.len == 0 => self.complete(value),
                Ok(value) => {
                    self.end_open();
                    self.complete(value);
                }
                Err(last) => {
                    let len = len - head - (count - 1) * SUBTREE;
                    self.open_next(last, len);
                }
            }
        }
    }

    /// The hash of all that was added.
    pub(crate) fn finalize(&self) -> blake3::Hash {
        let Some((first, others)) = self.complete.split_first() else {
            return self.open.finalize();
        };
        let merge = |right, left| merge_subtrees_non_root(left, &right, Mode::Hash);
        let right = others.iter().rev().fold(self.open.finalize_non_root(), merge);
        merge_subtrees_root(first, &right, Mode::Hash)
    }

    /// Subtree number `number`.
    fn subtree(number: u64) -> blake3::Hasher {
        let mut subtree = blake3::Hasher::new();
        subtree.set_input_offset(number * SUBTREE as u64);
        subtree
    }

    /// Opens a subtree that has `len` bytes, after completing the open one if that has any.
    fn open_next(&mut self, subtree: Box<blake3::Hasher>, len: usize) {
        if self.len > 0 {
            self.end_open();
        }
        (self.open, self.len) = (subtree, len);
    }

    fn end_open(&mut self) {
        let value = self.open.finalize_non_root();
        self.len = 0;
        self.complete(value);
    }

    /// Adds a complete subtree, and merges it with earlier ones of equal size.
    fn complete(&mut self, mut value: ChainingValue) {
        self.count += 1;
        let mut count = self.count;
        while count.is_multiple_of(2)
            && let Some(left) = self.complete.pop()
        {
            value = merge_subtrees_non_root(&left, &value, Mode::Hash);
            count /= 2;
        }
        self.complete.push(value);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::parallel::pool;

    #[test]
    fn it_hashes_as_blake3_does_however_the_bytes_are_cut() {
        let pool = pool(3).unwrap().unwrap();
        let whole: Vec<u8> = (0..9 * SUBTREE as u32 + 77).map(|i| (i / 7 % 251) as u8).collect();
        let ends = (0..=9).flat_map(|n| [0, 1, 1023, 1024, 1025].map(|more| n * SUBTREE + more));
        for end in ends.filter(|end| *end <= whole.len()) {
            let whole = &whole[..end];
            let expected = blake3::hash(whole);
            for size in [1000, SUBTREE - 1, SUBTREE, SUBTREE + 1, 3 * SUBTREE + 5, 1 << 30] {
                let slices: Vec<_> = whole.chunks(size).collect();
                let mut serial = TreeHasher::default();
                slices.iter().for_each(|slice| serial.update(slice));
                assert_eq!(serial.finalize(), expected, "{end} in {size}");
                let mut parallel = TreeHasher::default();
                pool.install(|| parallel.update_in_pool(&slices));
                assert_eq!(parallel.finalize(), expected, "{end} in {size}");
                // Alternating, with empty slices in between.
                let mut mixed = TreeHasher::default();
                for (i, slices) in slices.chunks(3).enumerate() {
                    match i % 2 {
                        0 => slices.iter().for_each(|slice| mixed.update(slice)),
                        _ => {
                            let slices = [&[][..], &[]].into_iter().chain(slices.iter().copied());
                            let slices: Vec<_> = slices.chain([&[][..]]).collect();
                            pool.install(|| mixed.update_in_pool(&slices));
                        }
                    }
                    // Finalizing changes nothing.
                    mixed.finalize();
                }
                assert_eq!(mixed.finalize(), expected, "{end} in {size}");
            }
        }
    }
}
