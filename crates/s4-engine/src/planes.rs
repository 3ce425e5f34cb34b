//! Splits values into the planes of a layout, and merges them again.

use s4_format::layout::{MAX_PLANES, Planes};
use s4_format::{Error, LayoutId, Result, crc32c_append};
use s4_planes::{Kernels, Width, token_bits};

use crate::Scratch;
use crate::once::{self, PIECE};
use crate::scratch::{sized, width_of};

/// A layout of values of one width.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Layout {
    kernels: Kernels,
    id: LayoutId,
    width: Width,
}

/// The place of a plane after decoding.
#[derive(Clone, Copy)]
pub(crate) enum Stored<'a> {
    /// In the scratch memory.
    Decoded,
    /// In the frame.
    Frame(&'a [u8]),
    /// In the frame, and its end in [`Scratch::split`].
    FrameAndTail(&'a [u8]),
}

impl<'a> Stored<'a> {
    pub(crate) fn bytes(self) -> Option<&'a [u8]> {
        match self {
            Self::Decoded => None,
            Self::Frame(bytes) | Self::FrameAndTail(bytes) => Some(bytes),
        }
    }
}

impl Layout {
    /// # Errors
    /// `Unsupported` for a width that no value has.
    pub(crate) fn new(kernels: Kernels, id: LayoutId, width: usize) -> Result<Self> {
        Ok(Self { kernels, id, width: width_of(width)? })
    }

    /// The planes of `bytes` bytes of values.
    ///
    /// # Errors
    /// `Unsupported` if there is no such layout of values of this width.
    pub(crate) fn planes(&self, bytes: usize) -> Result<Planes> {
        Planes::new(self.id, self.width.bytes(), bytes / self.width.bytes())
    }

    /// Splits values into the planes of `scratch`.
    pub(crate) fn split(&self, src: &[u8], scratch: &mut Scratch) -> Result<()> {
        let sizes = self.planes(src.len())?;
        if self.id == LayoutId::TOKEN {
            let [tokens, bits, ..] = &mut scratch.planes;
            let tokens = sized(tokens, sizes.sizes()[0]);
            let bits = sized(bits, sizes.sizes()[1]);
            scratch.token_bits = self.kernels.split_token(self.width, src, tokens, bits);
            return Ok(());
        }
        self.make_room(sizes.sizes(), &mut scratch.planes);
        self.split_part(src, (0, src.len() / self.width.bytes()), &mut scratch.planes);
        Ok(())
    }

    /// As [`Layout::split`], for values that may change meanwhile. Returns the CRC-32C of the
    /// values that were split.
    pub(crate) fn split_once(&self, src: &[u8], scratch: &mut Scratch) -> Result<u32> {
        let width = self.width.bytes();
        let sizes = self.planes(src.len())?;
        if self.id == LayoutId::TOKEN {
            // Its planes cannot be made piece by piece, and it is only used for differences, which are copies.
            return Err(Error::unsupported("layout `token` for values that are not differences"));
        }
        self.make_room(sizes.sizes(), &mut scratch.planes);
        if self.id == LayoutId::WHOLE {
            return once::copy_summed(src, &mut scratch.planes[0][..src.len()], |_, _| Ok(()));
        }
        let Scratch { planes, piece, .. } = scratch;
        let piece = sized(piece, PIECE);
        let mut crc = 0;
        for (i, part) in src.chunks(PIECE).enumerate() {
            let piece = &mut piece[..part.len()];
            once::copy(part, piece);
            crc = crc32c_append(crc, piece);
            self.split_part(piece, (i * (PIECE / width), src.len() / width), planes);
        }
        Ok(crc)
    }

    /// Splits a part of `n` values, from value index `first` on, into planes that have room for
    /// all. `first` is a multiple of eight. (Not for layout `token`.)
    fn split_part(&self, src: &[u8], (first, n): (usize, usize), planes: &mut [Vec<u8>; 4]) {
        let (k, w) = (&self.kernels, self.width);
        let len = src.len() / w.bytes();
        let [p0, p1, p2, p3] = planes;
        let part = first..first + len;
        // The low bytes of a value. Values of two bytes have no plane for them.
        let low = w.bytes().saturating_sub(2);
        let low = first * low..(first + len) * low;
        match self.id {
            LayoutId::FIELDS => {
                k.split_fields(w, src, &mut p0[part.clone()], &mut p1[part], &mut p2[low]);
            }
            LayoutId::FIELDS_SIGN => {
                let signs = &mut p0[first / 8..(first + len).div_ceil(8)];
                let (e, a) = (&mut p1[part.clone()], &mut p2[part]);
                k.split_fields_sign(w, src, signs, e, a, &mut p3[low]);
            }
            LayoutId::BYTES => k.split_bytes_part(w, src, first, &mut p0[..n * w.bytes()]),
            _ => p0[first * w.bytes()..(first + len) * w.bytes()].copy_from_slice(src),
        }
    }

    /// Makes the buffers of planes large enough.
    fn make_room(&self, sizes: &[usize], planes: &mut [Vec<u8>; 4]) {
        if self.id == LayoutId::BYTES {
            // All planes lie in the first buffer.
            sized(&mut planes[0], sizes.iter().sum());
            return;
        }
        for (plane, size) in planes.iter_mut().zip(sizes) {
            sized(plane, *size);
        }
    }

    /// Merges planes into `dst`, taking those that were stored raw from the frame itself. If `sum`,
    /// returns the CRC-32C of `dst` if it was computed on the way.
    pub(crate) fn merge(
        &self,
        sizes: &[usize],
        stored: &[Stored<'_>; MAX_PLANES],
        sum: bool,
        scratch: &mut Scratch,
        dst: &mut [u8],
    ) -> Result<Option<u32>> {
        let (k, w) = (&self.kernels, self.width);
        if self.id == LayoutId::BYTES {
            let all = sized(&mut scratch.planes[0], dst.len());
            for (i, plane) in stored.iter().enumerate() {
                if let Some(plane) = plane.bytes() {
                    all[i * sizes[i]..(i + 1) * sizes[i]].copy_from_slice(plane);
                }
            }
            k.merge_bytes(w, all, dst);
            return Ok(None);
        }
        let plane = |i: usize| match (stored[i].bytes(), sizes.get(i)) {
            (Some(bytes), _) => bytes,
            (None, Some(&size)) => &scratch.planes[i][..size],
            (None, None) => &[],
        };
        match self.id {
            LayoutId::FIELDS => {
                // The stream before plane 1 may have carried its end.
                let head = plane(1).len();
                let (e, e_tail) = plane(0).split_at(head);
                let (b, b_tail) = plane(2).split_at(head * (w.bytes() - 2));
                let (to, to_tail) = dst.split_at_mut(head * w.bytes());
                if !sum {
                    k.merge_fields(w, e, plane(1), b, to);
                    k.merge_fields(w, e_tail, &scratch.split[..e_tail.len()], b_tail, to_tail);
                    return Ok(None);
                }
                let mut crc = k.merge_fields_crc(w, e, plane(1), b, to, 0);
                if !e_tail.is_empty() {
                    crc = k.merge_fields_crc(w, e_tail, &scratch.split, b_tail, to_tail, crc);
                }
                return Ok(Some(crc));
            }
            LayoutId::FIELDS_SIGN => {
                k.merge_fields_sign(w, plane(0), plane(1), plane(2), plane(3), dst);
            }
            LayoutId::TOKEN => k
                .merge_token(w, plane(0), plane(1), dst)
                .map_err(|e| Error::corrupt(e.to_string()).in_stream(0))?,
            _ => dst.copy_from_slice(plane(0)),
        }
        Ok(None)
    }
}

/// Length of the plane of raw bits that belong to these tokens, in bytes.
pub(crate) fn token_plane_len(width: usize, tokens: &[u8]) -> Result<usize> {
    let w = width_of(width)?;
    let mut bits = 0usize;
    for &t in tokens {
        let n = token_bits(w, t).ok_or_else(|| Error::corrupt(format!("invalid token {t}")))?;
        bits += n as usize;
    }
    Ok(bits.div_ceil(8))
}
