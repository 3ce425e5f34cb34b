//! Decoding two segments at a time with tables in memory: everything but the vector instructions. A
//! step must wait for the one before it in its segment, but not for steps of another segment.

use s4_format::{Error, Result};

use super::scalar::{check_end, decode_escapes};
use super::stream::{BLOCK, Carry, LANES, Segment, block_at};
use super::table::{MAX_TABLES, Precision, Table};
use super::words::{Spare, Words};

/// The meaning of each slot of each table.
pub(super) struct Slots {
    /// Frequency, minus one if `P = 12` (12 bits), position among the symbol's slots (12 bits),
    /// symbol (8 bits).
    pub(super) all: Vec<u32>,
    /// The markers of escapes, if a table has one.
    pub(super) escapes: Option<Escapes>,
}

/// The marker of each table's escape.
pub(super) struct Escapes {
    /// A byte that is not one of the table's symbols.
    pub(super) markers: [u8; MAX_TABLES],
    /// All bits set if the table has an escape, otherwise 0.
    pub(super) present: [u8; MAX_TABLES],
}

impl Slots {
    /// The slots of some tables of one precision; `None` if a table has both an escape and every
    /// byte as a symbol, so that no byte is left to mark the escape.
    pub(super) fn new(tables: &[Table]) -> Option<Self> {
        let precision = tables.first()?.precision();
        let less = u32::from(precision == Precision::P12);
        let mut all = Vec::with_capacity(tables.len() << precision.bits());
        let mut escapes = Escapes { markers: [0; MAX_TABLES], present: [0; MAX_TABLES] };
        for (i, table) in tables.iter().enumerate() {
            if table.escape() > 0 {
                let mut seen = [false; 256];
                table.entries().iter().for_each(|entry| seen[usize::from(entry.symbol)] = true);
                *escapes.markers.get_mut(i)? = seen.iter().position(|seen| !seen)? as u8;
                *escapes.present.get_mut(i)? = 0xff;
            }
            let mut fill = |freq: u16, symbol: u8| {
                let slot = u32::from(freq).wrapping_sub(less) | u32::from(symbol) << 24;
                all.extend((0..u32::from(freq)).map(|bias| slot | bias << 12));
            };
            fill(table.escape(), escapes.markers.get(i).copied().unwrap_or(0));
            table.entries().iter().for_each(|entry| fill(entry.freq, entry.symbol));
        }
        let escapes = (escapes.present != [0; MAX_TABLES]).then_some(escapes);
        Some(Self { all, escapes })
    }
}

/// A segment to be decoded into `symbols`. There are as many contexts, or none if all are 0.
pub(super) struct SegmentJob<'a> {
    pub(super) segment: Segment<'a>,
    pub(super) contexts: &'a [u8],
    pub(super) symbols: &'a mut [u8],
}

/// A segment being decoded, at a block boundary: `contexts` and `symbols` are those that are left.
pub(super) struct SegmentDecoder<'a> {
    pub(super) states: [u32; LANES],
    pub(super) words: Words,
    pub(super) contexts: &'a [u8],
    symbols: &'a mut [u8],
}

impl<'a> SegmentDecoder<'a> {
    fn new(job: SegmentJob<'a>, spare: &mut Spare) -> Result<Self> {
        let SegmentJob { segment, contexts, symbols } = job;
        let words = Words::new(&segment, spare);
        Ok(Self { states: segment.states()?, words, contexts, symbols })
    }

    /// Whole blocks that are left.
    fn blocks(&self) -> usize {
        self.symbols.len() / BLOCK
    }

    #[inline]
    pub(super) fn next_block(&mut self) -> Result<&'a mut [u8; BLOCK]> {
        let (block, rest) =
            std::mem::take(&mut self.symbols).split_first_chunk_mut().ok_or_else(no_block)?;
        self.symbols = rest;
        Ok(block)
    }

    #[inline]
    pub(super) fn next_contexts(&mut self) -> Result<&'a [u8; BLOCK]> {
        let (block, rest) = self.contexts.split_first_chunk().ok_or_else(no_block)?;
        self.contexts = rest;
        Ok(block)
    }

    /// Puts the symbols that follow a block in the places of its escapes. `escapes` has a bit set
    /// for each escape.
    ///
    /// # Safety
    /// - As for [`Words::as_slice`].
    #[cold]
    pub(super) unsafe fn take_escapes(
        &mut self,
        escapes: [u64; BLOCK / 64],
        block: &mut [u8; BLOCK],
    ) -> Result<()> {
        let mut lanes = [0; LANES];
        for (lanes, row) in lanes.as_chunks_mut::<8>().0.iter_mut().zip(escapes) {
            *lanes = row.to_le_bytes();
        }
        let states = &mut self.states;
        // SAFETY: as for this function.
        unsafe { self.words.as_slice(|rest| decode_escapes(states, rest, lanes, block)) }
    }
}

#[cold]
fn no_block() -> Error {
    Error::limit("rans: output buffer is too small for a block")
}

/// A decoder in one set of vector instructions.
pub(super) trait Blocks {
    /// The decoder for these slots.
    fn new(slots: Slots) -> Self;

    /// Decodes `blocks` blocks of each segment.
    ///
    /// # Safety
    /// - The machine has the instructions, and the decoder supports the tables.
    /// - The words and the spare of each segment are valid; contexts are below the number of
    ///   tables.
    unsafe fn blocks<const N: usize>(
        &self,
        segments: [&mut SegmentDecoder<'_>; N],
        blocks: usize,
    ) -> Result<()>;
}

/// Decodes segments. The bytes that each carries are appended to `carries`.
///
/// # Errors
/// `Corrupt` if a state or the number of words is wrong.
///
/// # Safety
/// - The machine has the instructions, and the decoder supports the tables.
/// - Contexts are below the number of tables.
pub(super) unsafe fn decode<'a>(
    decoder: &impl Blocks,
    mut jobs: impl Iterator<Item = SegmentJob<'a>>,
    carries: &mut Vec<Carry>,
) -> Result<()> {
    while let Some(job) = jobs.next() {
        let (mut spare, mut other_spare) = (Spare::NEW, Spare::NEW);
        let mut segment = SegmentDecoder::new(job, &mut spare)?;
        let mut other =
            jobs.next().map(|job| SegmentDecoder::new(job, &mut other_spare)).transpose()?;
        // SAFETY: the segments and the spares are valid; the rest is as for this function.
        unsafe {
            if let Some(other) = &mut other {
                let both = segment.blocks().min(other.blocks());
                decoder.blocks([&mut segment, other], both)?;
            }
            for mut segment in std::iter::once(segment).chain(other) {
                let left = segment.blocks();
                decoder.blocks([&mut segment], left)?;
                last_block(decoder, &mut segment)?;
                carries.push(check_end(&segment.states, segment.words.left())?);
            }
        }
    }
    Ok(())
}

/// Decodes the rest of a segment, less than a block.
///
/// # Safety
/// - As for [`Blocks::blocks`].
unsafe fn last_block(decoder: &impl Blocks, segment: &mut SegmentDecoder<'_>) -> Result<()> {
    let rest = std::mem::take(&mut segment.symbols);
    if rest.is_empty() {
        return Ok(());
    }
    let mut symbols = [0; BLOCK];
    let padded = block_at(segment.contexts, 0, 0);
    let contexts: &[u8] = if segment.contexts.is_empty() { &[] } else { &padded };
    let mut last = SegmentDecoder { symbols: &mut symbols, contexts, ..*segment };
    // SAFETY: as for this function.
    unsafe { decoder.blocks([&mut last], 1)? };
    (segment.states, segment.words) = (last.states, last.words);
    rest.copy_from_slice(&symbols[..rest.len()]);
    Ok(())
}
