//! Planes cut into blocks with a size table (docs/codecs/blocks.md): the container of every bitstream
//! that a GPU codes in batches of blocks.

use std::any::Any;
use std::fmt::Debug;
use std::ops::Range;

use s4_format::{CodecId, Error, Result};

use crate::Workspace;
use crate::codec::{Codec, Context, Encoded, Symbols, need, no_param};

/// Bytes of a plane in each block of the open bitstreams; the last block may be shorter.
pub const BLOCK: usize = 1 << 16;

/// Every block starts at a multiple of this from the start of the stream.
pub const ALIGN: usize = 16;

/// Bytes of a table of `blocks` sizes, with padding up to where the first block starts.
pub fn table_len(blocks: usize) -> usize {
    (4 * blocks).next_multiple_of(ALIGN)
}

/// One block of a stream.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Block {
    /// Its bytes in the stream.
    pub stored: Range<usize>,
    /// The bytes of the plane that it codes.
    pub plane: Range<usize>,
}

/// A stream whose table was checked: the blocks lie within it, in order, without overlap, and fill
/// it exactly.
#[derive(Debug, Clone, Copy)]
pub struct Blocks<'a> {
    src: &'a [u8],
    len: usize,
    block: usize,
}

impl<'a> Blocks<'a> {
    /// Checks the table of a stream of a plane of `len` bytes in blocks of `block` bytes.
    ///
    /// # Errors
    /// `Truncated` if the stream ends early; `Corrupt` if bytes follow or a gap is not zero.
    ///
    /// # Panics
    /// If `block` is 0.
    pub fn parse(src: &'a [u8], len: usize, block: usize) -> Result<Self> {
        let count = len.div_ceil(block);
        let gap = |range: Range<usize>| match src.get(range) {
            None => Err(Error::truncated(format!(
                "stream of {} bytes is too short for {count} blocks",
                src.len()
            ))),
            Some(gap) if gap.iter().any(|&b| b != 0) => Err(Error::corrupt("padding is not zero")),
            Some(_) => Ok(()),
        };
        // No overflow: the table takes 4 bytes for each block, of which there are at most `len`.
        let mut at = table_len(count);
        gap(4 * count..at)?;
        let blocks = Self { src, len, block };
        for (number, size) in blocks.sizes().enumerate() {
            if number > 0 {
                gap(at..at.next_multiple_of(ALIGN))?;
                at = at.next_multiple_of(ALIGN);
            }
            if size == 0 || size > src.len() - at {
                let left = src.len() - at;
                return Err(Error::truncated(format!(
                    "block {number} has {size} bytes, {left} left"
                )));
            }
            at += size;
        }
        if at != src.len() {
            return Err(Error::corrupt(format!(
                "{} unexpected bytes after the last block",
                src.len() - at
            )));
        }
        Ok(blocks)
    }

    /// The sizes in the table.
    fn sizes(&self) -> impl Iterator<Item = usize> + 'a {
        let (table, _) = self.src.as_chunks::<4>();
        table.iter().take(self.len.div_ceil(self.block)).map(|s| u32::from_le_bytes(*s) as usize)
    }

    /// The blocks, in order.
    pub fn iter(&self) -> impl Iterator<Item = Block> + 'a {
        let (len, block) = (self.len, self.block);
        let mut at = table_len(len.div_ceil(block));
        self.sizes().enumerate().map(move |(number, size)| {
            let stored = at.next_multiple_of(ALIGN)..at.next_multiple_of(ALIGN) + size;
            at = stored.end;
            Block { stored, plane: number * block..len.min((number + 1) * block) }
        })
    }
}

/// The longest stream of a plane of `len` bytes, if no block of `n` bytes takes more than `bound(n)`.
pub fn bound(len: usize, block: usize, bound: impl Fn(usize) -> usize) -> usize {
    let whole = (len / block) * bound(block).next_multiple_of(ALIGN);
    let rest = len % block;
    table_len(len.div_ceil(block)) + whole + if rest > 0 { bound(rest) } else { 0 }
}

/// Writes the stream of a plane: `encode` writes one block into the start of its second argument,
/// which has at least `bound` bytes for it, and returns its size. Returns the size of the stream.
///
/// # Errors
/// `Limit` if `dst` is smaller than [`bound`] says; the errors of `encode`.
pub fn write(
    src: &[u8],
    dst: &mut [u8],
    block: usize,
    block_bound: impl Fn(usize) -> usize,
    mut encode: impl FnMut(&[u8], &mut [u8]) -> Result<usize>,
) -> Result<usize> {
    let dst = need(dst, bound(src.len(), block, block_bound))?;
    let count = src.len().div_ceil(block);
    let mut at = table_len(count);
    dst[4 * count..at].fill(0);
    for (number, part) in src.chunks(block).enumerate() {
        let start = at.next_multiple_of(ALIGN);
        dst[at..start].fill(0);
        let size = encode(part, &mut dst[start..])?;
        let field = u32::try_from(size)
            .map_err(|_| Error::limit(format!("block of {size} bytes is too long")))?;
        dst[4 * number..][..4].copy_from_slice(&field.to_le_bytes());
        at = start + size;
    }
    Ok(at)
}

/// Reads the stream of a plane in open blocks of [`BLOCK`] bytes, block by block.
pub(crate) fn read(
    src: &[u8],
    dst: &mut [u8],
    mut decode: impl FnMut(&[u8], &mut [u8]) -> Result<()>,
) -> Result<()> {
    for Block { stored, plane } in Blocks::parse(src, dst.len(), BLOCK)?.iter() {
        let offset = stored.start as u64;
        decode(&src[stored], &mut dst[plane]).map_err(|e| e.at_offset(offset))?;
    }
    Ok(())
}

/// A codec whose streams are blocks of [`BLOCK`] bytes, each coded separately, without a parameter.
pub(crate) trait BlockCodec: Debug + Send + Sync {
    /// The bitstream's id.
    const ID: CodecId;
    /// State that is kept from stream to stream, such as a library's contexts.
    type State: Any + Default + Send + Sync;

    /// The most bytes that a block of `len` bytes takes.
    fn block_bound(len: usize) -> usize;

    /// Encodes a block into the start of `dst`, which has as many bytes as its bound says; returns its size.
    fn encode_block(&self, block: &[u8], dst: &mut [u8], state: &mut Self::State) -> Result<usize>;

    /// Decodes a block, which may be any bytes, into `dst`, and fills it.
    fn decode_block(&self, block: &[u8], dst: &mut [u8], state: &mut Self::State) -> Result<()>;
}

impl<C: BlockCodec> Codec for C {
    fn id(&self) -> CodecId {
        C::ID
    }

    fn bound(&self, _: u8, len: usize) -> usize {
        bound(len, BLOCK, C::block_bound)
    }

    fn encode(
        &self,
        symbols: &Symbols<'_>,
        dst: &mut [u8],
        work: &mut Workspace,
    ) -> Result<Encoded> {
        no_param(C::ID, symbols.context.param)?;
        let state = work.state();
        let encode = |block: &[u8], dst: &mut [u8]| self.encode_block(block, dst, state);
        Ok(Encoded::of(write(symbols.bytes, dst, BLOCK, C::block_bound, encode)?))
    }

    fn decode(
        &self,
        ctx: Context<'_>,
        src: &[u8],
        dst: &mut [u8],
        work: &mut Workspace,
    ) -> Result<()> {
        no_param(C::ID, ctx.param)?;
        let state = work.state();
        read(src, dst, |block, dst| self.decode_block(block, dst, state))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stored(src: &[u8], dst: &mut [u8]) -> Result<usize> {
        dst[..src.len()].copy_from_slice(src);
        Ok(src.len())
    }

    fn stream(plane: &[u8], block: usize) -> Vec<u8> {
        let mut dst = vec![0xa5; bound(plane.len(), block, |n| n)];
        let len = write(plane, &mut dst, block, |n| n, stored).unwrap();
        dst.truncate(len);
        dst
    }

    #[test]
    fn the_layout_is_as_written_down() {
        let plane: Vec<u8> = (1..=25).collect();
        let stream = stream(&plane, 10);
        let mut expected = vec![10, 0, 0, 0, 10, 0, 0, 0, 5, 0, 0, 0, 0, 0, 0, 0];
        expected.extend(1..=10);
        expected.extend([0; 6]);
        expected.extend(11..=20);
        expected.extend([0; 6]);
        expected.extend(21..=25);
        assert_eq!(stream, expected);
        let blocks: Vec<_> = Blocks::parse(&stream, 25, 10).unwrap().iter().collect();
        assert_eq!(blocks.len(), 3);
        assert_eq!(blocks[2], Block { stored: 48..53, plane: 20..25 });
        assert!(self::stream(&[], 10).is_empty());
        assert_eq!(Blocks::parse(&[], 0, 10).unwrap().iter().count(), 0);
    }

    #[test]
    fn damage_is_refused() {
        let plane: Vec<u8> = (1..=25).collect();
        let good = stream(&plane, 10);
        for cut in 0..good.len() {
            assert!(Blocks::parse(&good[..cut], 25, 10).is_err(), "cut at {cut}");
        }
        // (If a size grows by less than the gap after the block, only the codec can refuse it.)
        for at in (0..16).chain(26..32).chain(42..48) {
            for byte in [0x80, 0xff] {
                let mut bad = good.clone();
                bad[at] ^= byte;
                assert!(Blocks::parse(&bad, 25, 10).is_err(), "byte {at}");
            }
        }
        for table in [[0u32, 10, 5], [10, 11, 5], [10, 9, 6], [10, 10, 4], [10, 10, u32::MAX]] {
            let mut bad = good.clone();
            bad[..12].copy_from_slice(table.map(u32::to_le_bytes).as_flattened());
            let expected = table == [10, 11, 5] || table == [10, 9, 6];
            assert_eq!(Blocks::parse(&bad, 25, 10).is_ok(), expected && table[2] == 5, "{table:?}");
        }
        let mut longer = good.clone();
        longer.push(0);
        assert!(Blocks::parse(&longer, 25, 10).is_err());
        for len in [0, 9, 20, 31, 1000, usize::MAX / 2] {
            assert!(Blocks::parse(&good, len, 10).is_err(), "{len}");
        }
    }
}
