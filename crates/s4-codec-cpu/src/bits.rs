//! Dense packing of values that need fewer than 8 bits (docs/codecs/bits.md).

use s4_format::{CodecId, Error, Result};
use s4_planes::Simd;

use crate::Workspace;
use crate::codec::{Codec, Context, Encoded, Symbols, need};

/// Codec `bits`: values below `2^width`, packed least significant bit first; 8 values take `width`
/// bytes. The parameter of the stream is the width, 1 to 7.
#[derive(Debug, Clone, Copy)]
pub struct Bits {
    simd: Simd,
}

impl Bits {
    /// Codes with a set of instructions; one that this machine lacks is replaced by plain Rust.
    pub fn new(simd: Simd) -> Self {
        Self { simd: if simd.is_available() { simd } else { Simd::Scalar } }
    }
}

/// The width that a parameter names.
fn width_of(param: u8) -> Result<u8> {
    match param {
        1..=7 => Ok(param),
        _ => Err(Error::unsupported(format!("packing to {param} bits"))),
    }
}

/// Bytes that `len` values of `width` bits take.
fn packed_len(len: usize, width: u8) -> usize {
    let width = usize::from(width);
    len / 8 * width + (len % 8 * width).div_ceil(8)
}

/// Each of the 8 bytes of the result is `2^width - 1`.
fn lanes(width: u8) -> u64 {
    u64::from((1u8 << width) - 1) * 0x0101_0101_0101_0101
}

impl Codec for Bits {
    fn id(&self) -> CodecId {
        CodecId::BITS
    }

    fn bound(&self, param: u8, len: usize) -> usize {
        packed_len(len, param.min(7))
    }

    fn encode(&self, symbols: &Symbols<'_>, dst: &mut [u8], _: &mut Workspace) -> Result<Encoded> {
        let (src, width) = (symbols.bytes, width_of(symbols.context.param)?);
        let len = packed_len(src.len(), width);
        let dst = &mut need(dst, len)?[..len];
        let (groups, rest) = src.as_chunks::<8>();
        let (head, tail) = dst.split_at_mut(groups.len() * usize::from(width));
        let mut all = pack(self.simd, width, groups, head);
        if !rest.is_empty() {
            let mut last = [0; 8];
            last[..rest.len()].copy_from_slice(rest);
            let mut packed = [0; 8];
            all |= pack(Simd::Scalar, width, &[last], &mut packed[..usize::from(width)]);
            tail.copy_from_slice(&packed[..tail.len()]);
        }
        if all & !lanes(width) != 0 {
            return Err(Error::unsupported(format!("values of more than {width} bits")));
        }
        Ok(Encoded::of(len))
    }

    fn decode(
        &self,
        ctx: Context<'_>,
        src: &[u8],
        dst: &mut [u8],
        _: &mut Workspace,
    ) -> Result<()> {
        let param = width_of(ctx.param)?;
        let len = packed_len(dst.len(), param);
        if src.len() < len {
            return Err(Error::truncated(format!("{} packed bytes, expected {len}", src.len())));
        }
        if src.len() > len {
            return Err(Error::corrupt(format!("{} packed bytes, expected {len}", src.len())));
        }
        let (groups, rest) = dst.as_chunks_mut::<8>();
        let (head, tail) = src.split_at(groups.len() * usize::from(param));
        unpack(self.simd, param, head, groups);
        if !rest.is_empty() {
            let mut packed = [0; 8];
            packed[..tail.len()].copy_from_slice(tail);
            let mut last = [[0; 8]];
            unpack(Simd::Scalar, param, &packed[..usize::from(param)], &mut last);
            rest.copy_from_slice(&last[0][..rest.len()]);
        }
        Ok(())
    }
}

/// Packs groups of 8 values into `dst` (`width` bytes each); returns the OR of all groups, from
/// which the caller can see whether every value fitted.
fn pack(simd: Simd, width: u8, groups: &[[u8; 8]], dst: &mut [u8]) -> u64 {
    #[cfg(target_arch = "x86_64")]
    if matches!(simd, Simd::Avx2 | Simd::Avx512) {
        // SAFETY: `Bits::new` has checked that the machine has the set, which includes BMI2.
        return unsafe { x86::pack(width, groups, dst) };
    }
    let _ = simd;
    pack_with(width, groups, dst, |group| {
        (0..8).fold(0, |bits, i| bits | (group >> (8 * i) & 0xff) << (width as u64 * i))
    })
}

/// Unpacks groups of `width` bytes from `src`, whose length is `width` for each group of `dst`.
fn unpack(simd: Simd, width: u8, src: &[u8], groups: &mut [[u8; 8]]) {
    #[cfg(target_arch = "x86_64")]
    if matches!(simd, Simd::Avx2 | Simd::Avx512) {
        // SAFETY: `Bits::new` has checked that the machine has the set, which includes BMI2.
        return unsafe { x86::unpack(width, src, groups) };
    }
    let _ = simd;
    let mask = (1u64 << width) - 1;
    unpack_with(width, src, groups, |bits| {
        (0..8).fold(0, |group, i| group | (bits >> (width as u64 * i) & mask) << (8 * i))
    });
}

/// [`pack`], with `gather` to pack one group. Where 8 bytes are left, whole words are written: the
/// next group overwrites their excess bytes.
#[inline(always)]
fn pack_with(width: u8, groups: &[[u8; 8]], dst: &mut [u8], gather: impl Fn(u64) -> u64) -> u64 {
    let width = usize::from(width);
    let mut all = 0;
    for (i, group) in groups.iter().enumerate() {
        let group = u64::from_le_bytes(*group);
        all |= group;
        let bytes = gather(group).to_le_bytes();
        let at = &mut dst[i * width..];
        match at.first_chunk_mut::<8>() {
            Some(at) => *at = bytes,
            None => at[..width].copy_from_slice(&bytes[..width]),
        }
    }
    all
}

/// [`unpack`], with `scatter` to unpack one group.
#[inline(always)]
fn unpack_with(width: u8, src: &[u8], groups: &mut [[u8; 8]], scatter: impl Fn(u64) -> u64) {
    let width = usize::from(width);
    for (i, group) in groups.iter_mut().enumerate() {
        let at = &src[i * width..];
        let bits = match at.first_chunk::<8>() {
            Some(at) => u64::from_le_bytes(*at),
            None => {
                let mut bytes = [0; 8];
                bytes[..width].copy_from_slice(&at[..width]);
                u64::from_le_bytes(bytes)
            }
        };
        *group = scatter(bits).to_le_bytes();
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::{_pdep_u64, _pext_u64};

    /// # Safety
    /// - The machine has BMI2.
    #[target_feature(enable = "bmi2")]
    pub(super) fn pack(width: u8, groups: &[[u8; 8]], dst: &mut [u8]) -> u64 {
        let lanes = super::lanes(width);
        super::pack_with(width, groups, dst, |group| _pext_u64(group, lanes))
    }

    /// # Safety
    /// - The machine has BMI2.
    #[target_feature(enable = "bmi2")]
    pub(super) fn unpack(width: u8, src: &[u8], groups: &mut [[u8; 8]]) {
        let lanes = super::lanes(width);
        super::unpack_with(width, src, groups, |bits| _pdep_u64(bits, lanes));
    }
}
