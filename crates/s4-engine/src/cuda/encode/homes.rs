//! Destinations of frames on the host: pieces that callers may hold on to, or the slot's own
//! memory.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use s4_codec_gpu::Device;
use s4_codec_gpu::abi::{EncodeResult, status};
use s4_format::limits::{ALIGN, MAX_CHUNK_BYTES};

use super::group::{Group, Home, result_of};
use crate::cuda::pieces::{Frames, Piece, Pieces};
use crate::cuda::worker::Session;

/// Bytes of the largest frame.
const LARGEST: u64 = MAX_CHUNK_BYTES as u64;
/// Smaller pieces are not relied on: too large a part of each may be left over at its end.
const LEAST_PIECE: u64 = 4 * LARGEST;

/// The piece that is being filled, and those to fill next.
#[derive(Default)]
pub(super) struct OpenPiece {
    piece: Option<Arc<Piece>>,
    used: usize,
    spare: Vec<Arc<Piece>>,
    /// Upper bound of the frames' bytes of groups that were cut and not placed yet.
    promised: u64,
    /// Whether the system refused a new piece. It is not asked again: a refusal takes a long time.
    refused: bool,
}

impl OpenPiece {
    /// Whether pieces have room for a group with frames of at most `bytes`, besides the promised bytes.
    pub(super) fn has_room(&mut self, bytes: u64, pieces: &Pieces, device: &Arc<Device>) -> bool {
        if pieces.size() < LEAST_PIECE {
            return false;
        }
        let wanted = self.promised + bytes;
        // The end of each may be too short for its next frame.
        let room = |bytes: u64| bytes.saturating_sub(LARGEST);
        let (each, left) = (room(pieces.size()), |p: &Arc<Piece>| p.pinned.len() - self.used);
        let mut found = self.piece.as_ref().map_or(0, |piece| room(left(piece) as u64));
        found += self.spare.len() as u64 * each;
        while found < wanted {
            let Some(piece) = self.ask(pieces, device) else { return false };
            self.spare.push(piece);
            found += each;
        }
        true
    }

    /// Keeps room for frames of at most `bytes` until their group is placed.
    pub(super) fn promise(&mut self, bytes: u64) {
        self.promised += bytes;
    }

    /// Finds room for a group's frames, which end at `ends`, in order. Returns the end of the last
    /// frame that found room.
    pub(super) fn place(
        &mut self,
        group: &mut Group<'_>,
        ends: &[u64],
        pieces: &Pieces,
        device: &Arc<Device>,
    ) -> u64 {
        let (mut first, mut ends) = (0, ends);
        self.promised -= std::mem::take(&mut group.promised);
        while !ends.is_empty() {
            let room = self.piece.as_ref().map_or(0, |p| p.pinned.len() - self.used) as u64;
            let fit = ends.partition_point(|end| end - first <= room);
            if let (Some(piece), Some(&end)) = (&self.piece, ends[..fit].last()) {
                let (piece, at, bytes) = (Arc::clone(piece), self.used, Bytes::new());
                group.homes.push(Home { piece, at, first, end, bytes });
                self.used += (end - first) as usize;
                (first, ends) = (end, &ends[fit..]);
            } else if self.used == 0 && self.piece.is_some() || !self.take(pieces, device) {
                break;
            }
        }
        first
    }

    /// Moves on to an empty piece, which has room for any frame.
    fn take(&mut self, pieces: &Pieces, device: &Arc<Device>) -> bool {
        // A full piece goes back as soon as nobody holds it.
        (self.piece, self.used) = (self.spare.pop(), 0);
        if self.piece.is_none() {
            self.piece = self.ask(pieces, device);
        }
        self.piece.is_some()
    }

    /// Another piece: an idle one, or a new one unless one was refused before.
    fn ask(&mut self, pieces: &Pieces, device: &Arc<Device>) -> Option<Arc<Piece>> {
        let mut piece = pieces.take_idle();
        if piece.is_none() && !self.refused {
            piece = pieces.take_new(device);
            self.refused = piece.is_none();
        }
        piece.map(Arc::new)
    }
}

impl Group<'_> {
    /// The ends of the frames on the device, padding included, in order.
    pub(super) fn ends(&self, session: &Session<'_>, total: u64) -> Vec<u64> {
        let routed = self.members.iter().filter(|m| m.route.is_some());
        let results = routed.map(|member| result_of(session, self, member));
        let sound = results.filter(|r| u32::from(r.status) == status::OK);
        let ends = sound.filter_map(|r| Some(padded(&r)?.end)).filter(|end| *end <= total);
        let mut ends: Vec<_> = ends.collect();
        ends.sort_unstable();
        ends
    }

    /// Makes the memory that callers may hold on to from the frames copied to pieces, with zeros after each frame.
    pub(super) fn seal(&mut self, session: &Session<'_>) {
        if self.homes.iter().any(|home| !home.bytes.is_empty()) {
            return;
        }
        for member in self.members.iter().filter(|m| m.route.is_some()) {
            let result = result_of(session, self, member);
            let Some(frame) = padded(&result) else { continue };
            let within = |h: &&Home| h.first <= frame.start && frame.end <= h.end;
            if let Some(home) = self.homes.iter().find(within) {
                let end = frame.start + u64::from(result.len);
                let (at, pad) = (home.at + (end - home.first) as usize, frame.end - end);
                // SAFETY: all was copied, and nobody has seen this part of the piece yet.
                unsafe { home.piece.pinned.slice_mut(at, pad as usize) }.fill(0);
            }
        }
        for home in &mut self.homes {
            let (piece, len) = (Arc::clone(&home.piece), (home.end - home.first) as usize);
            // SAFETY: from now on nobody writes there: the rest of the piece is for later groups.
            home.bytes = Bytes::from_owner(unsafe { Frames::new(piece, home.at, len) });
        }
    }

    /// The memory that holds a frame, given by its offset on the device and its length, and where
    /// the frame starts in it.
    pub(super) fn held(&self, (offset, len): (usize, usize)) -> Option<(&Bytes, usize)> {
        let frame = offset as u64..(offset + len) as u64;
        let home = self.homes.iter().find(|h| h.first <= frame.start && frame.end <= h.end)?;
        Some((&home.bytes, offset - home.first as usize))
    }
}

/// The range of a frame on the device, with the padding that follows it.
fn padded(result: &EncodeResult) -> Option<Range<u64>> {
    let end = result.offset.checked_add(result.len.into())?;
    Some(result.offset..end.checked_next_multiple_of(ALIGN as u64)?)
}
