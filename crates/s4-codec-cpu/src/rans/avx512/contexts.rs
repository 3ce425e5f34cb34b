//! Encoding with several tables of `P = 8`, which are looked up in memory.

use std::arch::x86_64::*;
use std::array::from_fn;

use s4_format::{Error, Result};

use super::super::digits::reciprocal;
use super::super::part::Part;
use super::super::stream::{BLOCK, LANES, RUN, block_at};
use super::super::table::{MAX_TABLES, Table};
use super::encode::{MOST_BLOCK, SegmentEncoder, States, Symbol, no_room};
use super::transpose::{load, to_steps};

/// Symbols of all tables.
const ALL: usize = MAX_TABLES * 256;

/// The encoder's look-up tables.
pub(crate) struct Encoder {
    /// The code of symbol `s` in table `t` is at index `256 t + s`: the frequency and the first slot (8 bits each) and
    /// the reciprocal of the frequency (16 bits); those of the escape if the table lacks the symbol, and 0 if it has
    /// no escape either.
    codes: Box<[u32; ALL]>,
    /// The shift of the reciprocal of each frequency.
    shift: [u8; 256],
    /// A bit for each table that has an escape. In such a table, the escape alone begins at slot 0.
    escapes: u16,
    padding: u8,
}

/// Blocks of a segment, and the tables of their symbols; all symbols are in table 0 if there are none.
struct Source<'a> {
    symbols: &'a [[u8; BLOCK]],
    contexts: &'a [[u8; BLOCK]],
}

/// A block before its look-ups: symbols and tables of two steps in each register.
#[derive(Clone, Copy)]
struct Block {
    symbols: [__m512i; RUN / 2],
    tables: [__m512i; RUN / 2],
}

/// The codes of a block, as looked up.
#[derive(Clone, Copy)]
struct Codes {
    /// For each step, the frequencies and first slots, and the reciprocals.
    steps: [[__m512i; 2]; RUN],
    /// For each step, a mask of the lanes whose tables may lack their symbols.
    marks: [u32; RUN],
}

impl Encoder {
    /// The encoder for tables of `P = 8`; `None` if a symbol has all slots of a table.
    pub(crate) fn new(tables: &[Table]) -> Option<Self> {
        let code = |freq: u16, start: u16| {
            let slots = u8::try_from(freq).ok()? as u32 | u32::from(start) << 8;
            Some(slots | u32::from(reciprocal(freq).0) << 16)
        };
        let mut this = Self {
            codes: Box::new([0; ALL]),
            shift: from_fn(|freq| reciprocal(freq.max(1) as u16).1 as u8),
            escapes: 0,
            padding: tables.first()?.padding(),
        };
        let rows = this.codes.as_chunks_mut::<256>().0.iter_mut();
        for (i, (table, codes)) in tables.iter().zip(rows).enumerate() {
            if table.escape() > 0 {
                codes.fill(code(table.escape(), 0)?);
                this.escapes |= 1 << i;
            }
            for (entry, start) in table.slots() {
                codes[usize::from(entry.symbol)] = code(entry.freq, start)?;
            }
        }
        Some(this)
    }

    /// Encodes segments, two side by side. Their contexts are below the number of tables.
    ///
    /// # Errors
    /// `Unsupported` if a symbol is not in its table and there is no escape.
    ///
    /// # Safety
    /// - The machine has AVX-512 F, BW, VL, VBMI and VBMI2.
    pub(crate) unsafe fn group(&self, parts: &mut [Part<'_>]) -> Result<()> {
        for two in parts.chunks_mut(2) {
            let mut segments: Vec<_> = two.iter_mut().map(SegmentEncoder::new).collect();
            // SAFETY: as for this function.
            unsafe {
                for segment in &mut segments {
                    self.last_block(segment)?;
                }
                if let [segment, other] = &mut segments[..] {
                    let both = segment.blocks.min(other.blocks);
                    let sources = [take_blocks(segment, both), take_blocks(other, both)];
                    self.blocks([segment, other], sources)?;
                }
                for segment in &mut segments {
                    let source = take_blocks(segment, segment.blocks);
                    self.blocks([segment], [source])?;
                }
            }
            segments.into_iter().for_each(SegmentEncoder::finish);
        }
        Ok(())
    }

    /// Encodes the last block of a segment if symbols do not fill it.
    ///
    /// # Safety
    /// - As for [`Encoder::group`].
    unsafe fn last_block(&self, segment: &mut SegmentEncoder<'_, '_>) -> Result<()> {
        let Some(symbols) = segment.part.last_block(self.padding) else { return Ok(()) };
        let contexts = match segment.part.contexts {
            [] => [0; BLOCK],
            contexts => block_at(contexts, (segment.blocks * BLOCK).min(contexts.len()), 0),
        };
        let source = Source { symbols: &[symbols], contexts: &[contexts] };
        // SAFETY: as for this function.
        unsafe { self.blocks([segment], [source]) }
    }

    /// Encodes blocks of `N` segments, equally many of each, the last one first.
    ///
    /// # Safety
    /// - As for [`Encoder::group`].
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vbmi,avx512vbmi2,popcnt,bmi1,bmi2")]
    unsafe fn blocks<const N: usize>(
        &self,
        mut segments: [&mut SegmentEncoder<'_, '_>; N],
        sources: [Source<'_>; N],
    ) -> Result<()> {
        let Some(last) = sources[0].symbols.len().checked_sub(1) else { return Ok(()) };
        let shifts = from_fn(|i| load(&self.shift.as_chunks::<64>().0[i]));
        let mut states: [_; N] = from_fn(|n| States::load(segments[n]));
        let (mut blocks, mut codes) = ([Block::NONE; N], [Codes::NONE; N]);
        for n in 0..N {
            blocks[n] = sources[n].block(last);
            for pair in 0..RUN / 2 {
                self.look_up(&blocks[n], pair, &mut codes[n]);
            }
        }
        for i in (0..=last).rev() {
            let mut next = [std::ptr::null_mut(); N];
            for n in 0..N {
                let words = &mut segments[n].part.words[..segments[n].at];
                if words.len() < MOST_BLOCK {
                    return Err(no_room());
                }
                next[n] = words.as_mut_ptr_range().end;
                if codes[n].marks != [0; RUN] {
                    let escapes = self.escapes(&sources[n], i, &codes[n].marks)?;
                    // SAFETY: the escapes of a block emit at most half of MOST_BLOCK bytes.
                    unsafe { states[n].put_escapes(&mut next[n], &sources[n].symbols[i], escapes) };
                }
            }
            // While the steps of a block wait for each other, codes of the block before it are loaded. (That of the
            // first one is itself, for want of another.)
            for n in 0..N {
                blocks[n] = sources[n].block(i.saturating_sub(1));
            }
            for pair in (0..RUN / 2).rev() {
                for n in 0..N {
                    let steps = &codes[n].steps;
                    let symbols = with_shifts([steps[2 * pair], steps[2 * pair + 1]], &shifts);
                    self.look_up(&blocks[n], pair, &mut codes[n]);
                    // SAFETY: each pair of steps emits at most 64 bytes, an eighth of MOST_BLOCK.
                    unsafe { states[n].pair(&symbols, &mut next[n]) };
                }
            }
            for (segment, next) in segments.iter_mut().zip(next) {
                segment.at = next as usize - segment.part.words.as_ptr() as usize;
            }
        }
        for (segment, states) in segments.iter_mut().zip(states) {
            states.store(segment);
        }
        Ok(())
    }

    /// Looks up the codes of two steps of a block.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    fn look_up(&self, block: &Block, pair: usize, codes: &mut Codes) {
        let low = _mm512_set1_epi16(0xff);
        // Without escapes, only code 0 means that the table lacks the symbol.
        let mask = _mm512_set1_epi16(if self.escapes == 0 { -1 } else { !0xff });
        let symbols = block.symbols[pair];
        // Nothing beyond the last table is read, whatever the contexts.
        let last = _mm512_set1_epi8(MAX_TABLES as i8 - 1);
        let tables = _mm512_and_si512(block.tables[pair], last);
        let first = [_mm512_and_si512(symbols, low), _mm512_slli_epi16::<8>(tables)];
        let second = [_mm512_srli_epi16::<8>(symbols), _mm512_andnot_si512(low, tables)];
        let first = self.gather(_mm512_or_si512(first[0], first[1]));
        let second = self.gather(_mm512_or_si512(second[0], second[1]));
        codes.steps[2 * pair] = first;
        codes.steps[2 * pair + 1] = second;
        codes.marks[2 * pair] = _mm512_testn_epi16_mask(first[0], mask);
        codes.marks[2 * pair + 1] = _mm512_testn_epi16_mask(second[0], mask);
    }

    /// The codes at 32 indices below [`ALL`]: the low words, and the high words.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    fn gather(&self, index: __m512i) -> [__m512i; 2] {
        const ODD: u32 = 0xaaaa_aaaa;
        let even = _mm512_and_si512(index, _mm512_set1_epi32(0xffff));
        let odd = _mm512_srli_epi32::<16>(index);
        // SAFETY: the indices are below the number of codes.
        let (even, odd) = unsafe {
            let codes = self.codes.as_ptr().cast();
            (_mm512_i32gather_epi32::<4>(even, codes), _mm512_i32gather_epi32::<4>(odd, codes))
        };
        [
            _mm512_mask_blend_epi16(ODD, even, _mm512_slli_epi32::<16>(odd)),
            _mm512_mask_blend_epi16(ODD, _mm512_srli_epi32::<16>(even), odd),
        ]
    }

    /// Of the marked symbols of a block, a bit for each that is escaped.
    ///
    /// # Errors
    /// `Unsupported` if one is neither in its table nor can be escaped.
    #[cold]
    fn escapes(&self, source: &Source<'_>, block: usize, marks: &[u32; RUN]) -> Result<[u64; 4]> {
        let (symbols, contexts) = (&source.symbols[block], source.contexts(block));
        let mut escapes = [0; 4];
        for (step, &marks) in marks.iter().enumerate() {
            let mut marks = marks;
            while marks != 0 {
                let i = RUN * marks.trailing_zeros() as usize + step;
                marks &= marks - 1;
                let table = usize::from(contexts[i]) % MAX_TABLES;
                if self.codes[256 * table + usize::from(symbols[i])] == 0 {
                    return Err(Error::unsupported(
                        "symbol is not in its table, which has no escape",
                    ));
                }
                escapes[i / 64] |= u64::from(self.escapes >> table & 1) << (i % 64);
            }
        }
        Ok(escapes)
    }
}

impl Source<'_> {
    fn contexts(&self, block: usize) -> &[u8; BLOCK] {
        self.contexts.get(block).unwrap_or(&[0; BLOCK])
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    fn block(&self, block: usize) -> Block {
        Block { symbols: steps_of(&self.symbols[block]), tables: steps_of(self.contexts(block)) }
    }
}

/// The bytes of a block as [`to_steps`] orders them.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
fn steps_of(block: &[u8; BLOCK]) -> [__m512i; RUN / 2] {
    let (rows, _) = block.as_chunks::<64>();
    // Not by `from_fn`, into which closures with target features are not inlined.
    to_steps(&[load(&rows[0]), load(&rows[1]), load(&rows[2]), load(&rows[3])])
}

impl Block {
    const NONE: Self = {
        // SAFETY: all bits zero is a value of vectors.
        unsafe { std::mem::zeroed() }
    };
}

impl Codes {
    const NONE: Self = {
        // SAFETY: all bits zero is a value of vectors and of integers.
        unsafe { std::mem::zeroed() }
    };
}

/// Two steps of codes, with the shifts that belong to their frequencies.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
fn with_shifts(codes: [[__m512i; 2]; 2], shifts: &[__m512i; 4]) -> [Symbol; 2] {
    let low = _mm512_set1_epi16(0xff);
    let [[first, multiplier], [second, other]] = codes;
    let freqs = [_mm512_and_si512(first, low), _mm512_and_si512(second, low)];
    // All frequencies in one register, the second ones in the high bytes.
    let both = _mm512_or_si512(freqs[0], _mm512_slli_epi16::<8>(freqs[1]));
    let a = _mm512_permutex2var_epi8(shifts[0], both, shifts[1]);
    let b = _mm512_permutex2var_epi8(shifts[2], both, shifts[3]);
    let shift = _mm512_mask_blend_epi8(_mm512_movepi8_mask(both), a, b);
    [
        Symbol {
            freq: freqs[0],
            start: _mm512_srli_epi16::<8>(first),
            multiplier,
            shift: _mm512_and_si512(shift, low),
        },
        Symbol {
            freq: freqs[1],
            start: _mm512_srli_epi16::<8>(second),
            multiplier: other,
            shift: _mm512_srli_epi16::<8>(shift),
        },
    ]
}

/// Takes the last `count` of the blocks of a segment that are left.
fn take_blocks<'b>(segment: &mut SegmentEncoder<'_, 'b>, count: usize) -> Source<'b> {
    const { assert!(LANES * RUN == BLOCK) };
    let end = segment.blocks;
    segment.blocks -= count;
    let of =
        |all: &'b [u8]| all.as_chunks::<BLOCK>().0.get(segment.blocks..end).unwrap_or_default();
    Source { symbols: of(segment.part.symbols), contexts: of(segment.part.contexts) }
}
