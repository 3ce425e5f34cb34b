//! The specification in plain Rust: any `P`, any number of tables, contexts and escapes. It is the
//! oracle that the vector kernels are tested against.

use s4_format::{Error, Result};

use super::digits::reciprocal32;
use super::part::Part;
use super::stream::{BLOCK, CARRY_LEN, Carry, LANES, RUN, START, Segment, block_at};
use super::table::Table;

/// A symbol's parameters for the encoder.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct Code {
    /// Frequency of the symbol, or of the escape if it has none.
    freq: u16,
    /// Its first slot.
    start: u16,
    /// With `shift`, divides by the frequency (see `digits`).
    multiplier: u32,
    shift: u8,
    escaped: bool,
}

impl Code {
    fn new(freq: u16, start: u16, escaped: bool) -> Self {
        let (multiplier, shift) = reciprocal32(freq.max(1));
        Self { freq, start, multiplier, shift, escaped }
    }

    /// `(x / freq) * 2^P + start + x % freq`, for `x < freq * 2^(32 - P)`.
    fn step<const P: u32>(&self, x: u32) -> u32 {
        let product = (u64::from(x) * u64::from(self.multiplier)) >> 32;
        let quotient = (x + product as u32) >> self.shift;
        x + quotient * ((1 << P) - u32::from(self.freq)) + u32::from(self.start)
    }
}

/// Codes of every symbol in every table.
pub(super) struct Encoder {
    codes: Vec<[Code; 256]>,
    padding: u8,
}

impl Encoder {
    pub(super) fn new(tables: &[Table]) -> Self {
        let codes = tables.iter().map(|table| {
            let mut codes = [Code::new(table.escape(), 0, true); 256];
            for (entry, start) in table.slots() {
                codes[usize::from(entry.symbol)] = Code::new(entry.freq, start, false);
            }
            codes
        });
        Self { codes: codes.collect(), padding: tables.first().map_or(0, Table::padding) }
    }

    /// Codes one segment.
    ///
    /// # Errors
    /// `Unsupported` if a symbol is neither in its table nor can be escaped.
    pub(super) fn segment<const P: u32>(&self, part: &mut Part<'_>) -> Result<()> {
        let mut x = part.start;
        let mut words = Words { at: part.words.len(), bytes: part.words };
        let mut codes = [Code::default(); BLOCK];
        for start in (0..part.symbols.len()).step_by(BLOCK).rev() {
            let block = block_at(part.symbols, start, self.padding);
            let contexts = match part.contexts {
                [] => [0; BLOCK],
                contexts => block_at(contexts, start, 0),
            };
            for ((code, &context), &symbol) in codes.iter_mut().zip(&contexts).zip(&block) {
                *code = self.codes[usize::from(context)][usize::from(symbol)];
            }
            if codes.iter().any(|code| code.freq == 0) {
                return Err(Error::unsupported("symbol is not in its table, which has no escape"));
            }
            let mut marks = [0; LANES];
            for (marks, codes) in marks.iter_mut().zip(codes.as_chunks::<RUN>().0) {
                for code in codes.iter().rev() {
                    *marks = *marks << 1 | u8::from(code.escaped);
                }
            }
            encode_escapes(&mut x, &block, &marks, &mut words);
            encode_steps::<P>(&mut x, &codes, &mut words);
        }
        part.len = words.bytes.len() - words.at;
        for (state, x) in part.states.as_chunks_mut::<4>().0.iter_mut().zip(x) {
            *state = x.to_le_bytes();
        }
        Ok(())
    }
}

/// Words, emitted from the end of `bytes` towards its start.
struct Words<'a> {
    bytes: &'a mut [u8],
    at: usize,
}

impl Words<'_> {
    /// Emits the low half of `x` if `x` has reached `limit`.
    fn renormalise(&mut self, x: u32, limit: u64) -> u32 {
        // Branch-free, because it is unpredictable whether it has: a word that is not emitted is
        // overwritten by the next one.
        let full = u64::from(x) >= limit;
        // Not `copy_from_slice`, which calls a function for two bytes.
        [self.bytes[self.at - 2], self.bytes[self.at - 1]] = (x as u16).to_le_bytes();
        self.at -= 2 * usize::from(full);
        if full { x >> 16 } else { x }
    }
}

/// Encodes the escapes of a block, the last round first. `marks` has a bit for each escaped symbol
/// of each lane.
fn encode_escapes(
    x: &mut [u32; LANES],
    block: &[u8; BLOCK],
    marks: &[u8; LANES],
    words: &mut Words<'_>,
) {
    if *marks == [0; LANES] {
        return;
    }
    // The lanes of each round. Most blocks have few escapes, and most lanes none.
    let mut rounds = [0u32; RUN];
    for (i, group) in marks.as_chunks::<8>().0.iter().enumerate().filter(|(_, g)| **g != [0; 8]) {
        for (lane, marks) in group.iter().enumerate() {
            let rounds = &mut rounds[..marks.count_ones() as usize];
            rounds.iter_mut().for_each(|lanes| *lanes |= 1 << (8 * i + lane));
        }
    }
    for (round, &lanes) in rounds.iter().enumerate().rev() {
        let mut lanes = lanes;
        while lanes != 0 {
            let lane = lanes.ilog2() as usize;
            lanes ^= 1 << lane;
            let mut marks = marks[lane];
            (0..round).for_each(|_| marks &= marks.saturating_sub(1));
            let symbol = block[lane * RUN + marks.trailing_zeros() as usize];
            let y = words.renormalise(x[lane], 1 << 24);
            x[lane] = y << 8 | u32::from(symbol);
        }
    }
}

/// As [`encode_escapes`], for kernels: the words go before `at` in `words`.
#[cfg(target_arch = "x86_64")]
pub(super) fn put_escapes(
    x: &mut [u32; LANES],
    block: &[u8; BLOCK],
    marks: &[u8; LANES],
    words: &mut [u8],
    at: &mut usize,
) {
    let mut words = Words { bytes: words, at: *at };
    encode_escapes(x, block, marks, &mut words);
    *at = words.at;
}

fn encode_steps<const P: u32>(x: &mut [u32; LANES], codes: &[Code; BLOCK], words: &mut Words<'_>) {
    if P == 8 {
        for pair in (0..RUN).step_by(2).rev() {
            for (lane, x) in x.iter_mut().enumerate().rev() {
                let [c0, c1] = [&codes[lane * RUN + pair], &codes[lane * RUN + pair + 1]];
                let limit = (u64::from(c0.freq) * u64::from(c1.freq)) << 16;
                let y = words.renormalise(*x, limit);
                *x = c0.step::<P>(c1.step::<P>(y));
            }
        }
    } else {
        for k in (0..RUN).rev() {
            for (lane, x) in x.iter_mut().enumerate().rev() {
                let code = &codes[lane * RUN + k];
                let y = words.renormalise(*x, u64::from(code.freq) << (32 - P));
                *x = code.step::<P>(y);
            }
        }
    }
}

/// A slot's parameters for the decoder.
#[derive(Debug, Clone, Copy, Default)]
struct Slot {
    /// Frequency of the symbol that owns the slot.
    freq: u16,
    /// The slot's position among those of the symbol.
    bias: u16,
    symbol: u8,
    escape: bool,
}

/// The slots of every table.
pub(super) struct Decoder {
    slots: Vec<Slot>,
}

impl Decoder {
    pub(super) fn new(tables: &[Table]) -> Self {
        let mut slots = Vec::new();
        for table in tables {
            let escape = table.escape();
            slots.extend((0..escape).map(|bias| Slot {
                freq: escape,
                bias,
                symbol: 0,
                escape: true,
            }));
            for entry in table.entries() {
                slots.extend((0..entry.freq).map(|bias| Slot {
                    freq: entry.freq,
                    bias,
                    symbol: entry.symbol,
                    escape: false,
                }));
            }
        }
        Self { slots }
    }

    /// Decodes one segment into `symbols`. `contexts` is as long as `symbols`, each below the
    /// number of tables, or empty if all are 0.
    ///
    /// # Errors
    /// `Corrupt` if a state or the number of words is wrong.
    pub(super) fn segment<const P: u32>(
        &self,
        segment: Segment<'_>,
        contexts: &[u8],
        symbols: &mut [u8],
    ) -> Result<Carry> {
        let mut x = segment.states()?;
        let mut words = segment.words();
        for start in (0..symbols.len()).step_by(BLOCK) {
            let mut block = [0; BLOCK];
            let escapes = if contexts.is_empty() {
                self.steps::<P, false>(&mut x, &mut words, &[0; BLOCK], &mut block)?
            } else {
                let contexts = block_at(contexts, start, 0);
                self.steps::<P, true>(&mut x, &mut words, &contexts, &mut block)?
            };
            decode_escapes(&mut x, &mut words, escapes, &mut block)?;
            let rest = &mut symbols[start..];
            let len = rest.len().min(BLOCK);
            rest[..len].copy_from_slice(&block[..len]);
        }
        check_end(&x, words.len())
    }

    /// The steps of a block; returns for each lane the positions of its escapes as bits.
    fn steps<const P: u32, const CONTEXTS: bool>(
        &self,
        x: &mut [u32; LANES],
        words: &mut &[[u8; 2]],
        contexts: &[u8; BLOCK],
        block: &mut [u8; BLOCK],
    ) -> Result<[u8; LANES]> {
        let first = &self.slots[..1 << P];
        let mut escapes = [0; LANES];
        for k in 0..RUN {
            for lane in 0..LANES {
                let i = lane * RUN + k;
                let table = if CONTEXTS {
                    &self.slots[usize::from(contexts[i]) << P..][..1 << P]
                } else {
                    first
                };
                let slot = table[(x[lane] & ((1 << P) - 1)) as usize];
                x[lane] = u32::from(slot.freq) * (x[lane] >> P) + u32::from(slot.bias);
                block[i] = slot.symbol;
                escapes[lane] |= u8::from(slot.escape) << k;
            }
            if P != 8 || k % 2 == 1 {
                refill(x, words)?;
            }
        }
        Ok(escapes)
    }
}

/// Replaces the escapes of a block by the symbols that follow it. In each round, only lanes with
/// escapes left can need a word.
pub(super) fn decode_escapes(
    x: &mut [u32; LANES],
    words: &mut &[[u8; 2]],
    mut escapes: [u8; LANES],
    block: &mut [u8; BLOCK],
) -> Result<()> {
    while escapes != [0; LANES] {
        for (lane, escapes) in escapes.iter_mut().enumerate().filter(|(_, e)| **e != 0) {
            block[lane * RUN + escapes.trailing_zeros() as usize] = x[lane] as u8;
            x[lane] >>= 8;
            *escapes &= *escapes - 1;
            if x[lane] < START {
                let (word, rest) = words.split_first().ok_or_else(too_few)?;
                x[lane] = x[lane] << 16 | u32::from(u16::from_le_bytes(*word));
                *words = rest;
            }
        }
    }
    Ok(())
}

fn too_few() -> Error {
    Error::corrupt("rans segment has too few words")
}

/// Gives a word to every lane whose state is below 2^16. Branch-free, because it is unpredictable
/// which lanes these are.
fn refill(x: &mut [u32; LANES], words: &mut &[[u8; 2]]) -> Result<()> {
    let taken = x.iter().filter(|&&x| x < START).count();
    let Some((now, later)) = words.split_at_checked(taken) else {
        return Err(too_few());
    };
    let mut next = 0;
    for x in x {
        let needs = *x < START;
        let word = u16::from_le_bytes(now.get(next).copied().unwrap_or_default());
        *x = if needs { *x << 16 | u32::from(word) } else { *x };
        next += usize::from(needs);
    }
    *words = later;
    Ok(())
}

/// Checks the end of a segment: all states are back where the encoder started, and `left`, the
/// number of words that were not used, is 0. Returns the words that the states carried.
pub(super) fn check_end(x: &[u32; LANES], left: usize) -> Result<Carry> {
    if x.iter().any(|x| x >> 16 != 1) {
        return Err(Error::corrupt("rans states do not end where they started"));
    }
    if left != 0 {
        return Err(Error::corrupt(format!("{left} unused words in a rans segment")));
    }
    let mut carry = [0; CARRY_LEN];
    for (bytes, x) in carry.as_chunks_mut::<2>().0.iter_mut().zip(x) {
        *bytes = (*x as u16).to_le_bytes();
    }
    Ok(carry)
}
