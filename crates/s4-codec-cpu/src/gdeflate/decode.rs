//! The decoder of a page: 32 lanes in turn, each with its own bits.

use s4_format::{Error, Result};

use super::code::{CodeEntry, Decoder, END, LITLEN, MAX_PRE_BITS, OFFSETS, PRE_ORDER, fixed};
use super::lanes::LANES;

type LitLen = Decoder<1024>;
type Offsets = Decoder<256>;
type Pre = Decoder<{ 1 << MAX_PRE_BITS }>;

/// The codes of a block: of literals and lengths, and of offsets.
type Codes = (LitLen, Offsets);

/// The most Deflate blocks of a page: each may have codes of its own, which take longer to prepare than its
/// bytes to read.
pub(super) const MOST_BLOCKS: usize = 1024;

/// Decodes one page, which must fill `dst` exactly and end where `src` ends.
pub(super) fn page(src: &[u8], dst: &mut [u8]) -> Result<()> {
    let mut lanes = Lanes::new(src)?;
    let mut out = Output { dst, pos: 0 };
    let mut fixed_codes = None;
    for number in 1.. {
        if number > MOST_BLOCKS {
            return Err(Error::limit(format!("page has more than {MOST_BLOCKS} Deflate blocks")));
        }
        let last = lanes.take(0, 1) == 1;
        let kind = lanes.take(0, 2);
        lanes.refill(0)?;
        match kind {
            0 => stored(&mut lanes, &mut out)?,
            1 => {
                if fixed_codes.is_none() {
                    let (litlen, offsets) = fixed();
                    fixed_codes = Some(codes(&litlen, &offsets)?);
                }
                if let Some(codes) = &fixed_codes {
                    coded(&mut lanes, &mut out, codes)?;
                }
            }
            2 => {
                let mut lengths = [0; LITLEN + OFFSETS];
                let (litlen, offsets) = code_lengths(&mut lanes, &mut lengths)?;
                coded(&mut lanes, &mut out, &codes(litlen, offsets)?)?;
            }
            _ => return Err(Error::corrupt("invalid block type 3")),
        }
        if last {
            break;
        }
    }
    let (written, wanted) = (out.pos, out.dst.len());
    if written != wanted {
        return Err(Error::corrupt(format!("page decodes to {written} bytes, expected {wanted}")));
    }
    if lanes.at != src.len() {
        return Err(Error::corrupt(format!(
            "{} unexpected bytes after the page",
            src.len() - lanes.at
        )));
    }
    Ok(())
}

/// The bits of the lanes. Before each step a lane holds at least 32 bits.
struct Lanes<'a> {
    src: &'a [u8],
    at: usize,
    bits: [u64; LANES],
    held: [u32; LANES],
}

impl<'a> Lanes<'a> {
    /// Gives each lane its first word.
    fn new(src: &'a [u8]) -> Result<Self> {
        let mut lanes = Self { src, at: 0, bits: [0; LANES], held: [0; LANES] };
        (0..LANES).try_for_each(|lane| lanes.refill(lane))?;
        Ok(lanes)
    }

    /// Takes up to 16 bits. A step takes no more than 32 in all before it refills.
    #[inline(always)]
    fn take(&mut self, lane: usize, bits: u32) -> u32 {
        let low = self.bits[lane] as u32 & ((1 << bits) - 1);
        self.skip(lane, bits);
        low
    }

    #[inline(always)]
    fn skip(&mut self, lane: usize, bits: u32) {
        debug_assert!(bits <= self.held[lane], "step takes more bits than the lane holds");
        self.bits[lane] >>= bits;
        self.held[lane] -= bits;
    }

    /// Ends a step: a lane with fewer than 32 bits takes the next word of the page.
    #[inline(always)]
    fn refill(&mut self, lane: usize) -> Result<()> {
        if self.held[lane] < 32 {
            let word = self.src.get(self.at..).and_then(|rest| rest.first_chunk::<4>());
            let Some(word) = word else { return Err(ends_early()) };
            self.bits[lane] |= u64::from(u32::from_le_bytes(*word)) << self.held[lane];
            self.held[lane] += 32;
            self.at += 4;
        }
        Ok(())
    }
}

#[cold]
fn ends_early() -> Error {
    Error::truncated("page ends early")
}

/// The output so far. `pos` runs ahead of bytes that deferred copies still owe.
struct Output<'a> {
    dst: &'a mut [u8],
    pos: usize,
}

#[cold]
fn too_long(len: usize) -> Error {
    Error::corrupt(format!("page decodes to more than {len} bytes"))
}

/// A stored block: bytes as they are, spread over the lanes.
fn stored(lanes: &mut Lanes<'_>, out: &mut Output<'_>) -> Result<()> {
    let len = lanes.take(0, 16) as usize;
    if len == 0 {
        return lanes.refill(0);
    }
    let whole = out.dst.len();
    let place = out.dst[out.pos..].get_mut(..len).ok_or_else(|| too_long(whole))?;
    for (i, byte) in place.iter_mut().enumerate() {
        *byte = lanes.take(i % LANES, 8) as u8;
        lanes.refill(i % LANES)?;
    }
    out.pos += len;
    Ok(())
}

/// Reads the codeword lengths of both codes.
fn code_lengths<'b>(
    lanes: &mut Lanes<'_>,
    lengths: &'b mut [u8; LITLEN + OFFSETS],
) -> Result<(&'b [u8], &'b [u8])> {
    let litlen = lanes.take(0, 5) as usize + 257;
    let offsets = lanes.take(0, 5) as usize + 1;
    let explicit = lanes.take(0, 4) as usize + 4;
    lanes.refill(0)?;
    let mut pre = [0; 19];
    for (lane, &symbol) in PRE_ORDER[..explicit].iter().enumerate() {
        pre[usize::from(symbol)] = lanes.take(lane, 3) as u8;
        lanes.refill(lane)?;
    }
    let pre = Pre::new(&pre, CodeEntry::plain)?;
    let lengths = &mut lengths[..litlen + offsets];
    let (mut done, mut lane) = (0, 0);
    while done < lengths.len() {
        let entry = pre.find(lanes.bits[lane])?;
        lanes.skip(lane, entry.bits());
        let (value, times) = match entry.value() {
            16 => {
                let before = done.checked_sub(1).map(|i| lengths[i]);
                let before =
                    before.ok_or_else(|| Error::corrupt("no codeword length to repeat"))?;
                (before, 3 + lanes.take(lane, 2))
            }
            17 => (0, 3 + lanes.take(lane, 3)),
            18 => (0, 11 + lanes.take(lane, 7)),
            length => (length as u8, 1),
        };
        lanes.refill(lane)?;
        lane = (lane + 1) % LANES;
        let run = lengths[done..].get_mut(..times as usize);
        run.ok_or_else(|| Error::corrupt("too many codeword lengths"))?.fill(value);
        done += times as usize;
    }
    Ok(lengths.split_at(litlen))
}

/// Matches whose offset is read one round after their length.
struct Deferred {
    /// Bit `lane`: that lane owes a copy.
    owing: u32,
    copies: [(usize, usize); LANES],
}

/// The codes with these codeword lengths.
fn codes(litlen: &[u8], offsets: &[u8]) -> Result<Codes> {
    if litlen[END] == 0 {
        return Err(Error::corrupt("block has no end-of-block code"));
    }
    Ok((LitLen::new(litlen, CodeEntry::litlen)?, Offsets::new(offsets, CodeEntry::offset)?))
}

/// A block of literals and matches.
fn coded(lanes: &mut Lanes<'_>, out: &mut Output<'_>, (litlen, offsets): &Codes) -> Result<()> {
    let mut deferred = Deferred { owing: 0, copies: [(0, 0); LANES] };
    let mut lane = 0;
    loop {
        if lane == 0 && deferred.owing == 0 {
            lane = literals(lanes, out, litlen);
        }
        if deferred.owing >> lane & 1 == 1 {
            deferred.settle(lanes, out, offsets, lane)?;
        } else {
            let entry = litlen.find(lanes.bits[lane])?;
            lanes.skip(lane, entry.bits());
            if entry.is_literal() {
                let len = out.dst.len();
                *out.dst.get_mut(out.pos).ok_or_else(|| too_long(len))? = entry.value() as u8;
                out.pos += 1;
            } else if entry.ends() {
                break;
            } else {
                let len = (entry.value() + lanes.take(lane, entry.extra())) as usize;
                if len > out.dst.len() - out.pos {
                    return Err(too_long(out.dst.len()));
                }
                deferred.copies[lane] = (out.pos, len);
                deferred.owing |= 1 << lane;
                out.pos += len;
            }
        }
        lanes.refill(lane)?;
        lane = (lane + 1) % LANES;
    }
    // The copies still owed, starting with the lane that read the end.
    for lane in (lane..LANES).chain(0..lane) {
        if deferred.owing >> lane & 1 == 1 {
            deferred.settle(lanes, out, offsets, lane)?;
        }
        lanes.refill(lane)?;
    }
    Ok(())
}

/// Decodes whole rounds of the lanes, from lane 0 on, for as long as they need no checks and hold
/// only literals. Returns the next lane.
fn literals(lanes: &mut Lanes<'_>, out: &mut Output<'_>, code: &LitLen) -> usize {
    loop {
        let words = lanes.src[lanes.at..].as_chunks::<4>().0.first_chunk::<LANES>();
        let place = out.dst[out.pos..].first_chunk_mut::<LANES>();
        let (Some(words), Some(place)) = (words, place) else { return 0 };
        let (mut lane, mut used) = (0, 0);
        while lane < LANES {
            let entry = code.peek(lanes.bits[lane]);
            if !entry.is_literal() {
                break;
            }
            place[lane] = entry.value() as u8;
            let bits = lanes.bits[lane] >> entry.bits();
            let held = lanes.held[lane] - entry.bits();
            // Branch-free: a branch would be taken every third or fourth time.
            let word = u64::from(u32::from_le_bytes(words[used % LANES])) << (held % 32);
            let low = held < 32;
            lanes.bits[lane] = bits | if low { word } else { 0 };
            lanes.held[lane] = held + if low { 32 } else { 0 };
            used += usize::from(low);
            lane += 1;
        }
        lanes.at += 4 * used;
        out.pos += lane;
        if lane < LANES {
            return lane;
        }
    }
}

impl Deferred {
    /// Reads the offset of the copy that a lane owes, and makes the copy. Everything before its
    /// place has been written, because copies are settled in the order of their places.
    fn settle(
        &mut self,
        lanes: &mut Lanes<'_>,
        out: &mut Output<'_>,
        offsets: &Offsets,
        lane: usize,
    ) -> Result<()> {
        self.owing &= !(1 << lane);
        let (start, len) = self.copies[lane];
        let entry = offsets.find(lanes.bits[lane])?;
        lanes.skip(lane, entry.bits());
        let offset = (entry.value() + lanes.take(lane, entry.extra())) as usize;
        let from = start.checked_sub(offset).ok_or_else(|| {
            Error::corrupt(format!(
                "copy offset {offset} points before the start of the page (position {start})"
            ))
        })?;
        if offset >= len {
            out.dst.copy_within(from..from + len, start);
        } else {
            // The bytes written so far are repeated, which doubles them each time.
            let mut done = 0;
            while done < len {
                let more = (offset + done).min(len - done);
                out.dst.copy_within(from..from + more, start + done);
                done += more;
            }
        }
        Ok(())
    }
}
