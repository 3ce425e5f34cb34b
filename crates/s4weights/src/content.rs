//! Consecutive bytes on their way to a file or an object: some copied, some in place.

use std::ops::Range;

use bytes::Bytes;
use object_store::PutPayload;
use rayon::ThreadPool;
use s4_engine::EncodedFrame;

use crate::buffers::{LargeBuffer, LargeBuffers, append};
use crate::hash::TreeHasher;

/// Bytes to be added.
#[derive(Clone)]
pub(crate) enum Part<'a> {
    /// Bytes that are copied.
    Copied(&'a [u8]),
    /// Bytes that are held in place, without a copy.
    Held(Bytes),
}

impl Part<'_> {
    pub(crate) fn bytes(&self) -> &[u8] {
        match self {
            Self::Copied(bytes) => bytes,
            Self::Held(bytes) => bytes,
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.bytes().len()
    }
}

/// Consecutive chunks, joined to few parts.
#[derive(Default)]
pub(crate) struct Parts<'a> {
    list: Vec<Part<'a>>,
    /// The memory that the last part is a slice of, and its range there.
    open: Option<(&'a Bytes, Range<usize>)>,
}

impl<'a> Parts<'a> {
    /// Adds a chunk behind a gap of zeros. If it lies in memory behind the one before with the same
    /// gap, the two become one part.
    pub(crate) fn add(&mut self, gap: &'static [u8], frame: &EncodedFrame<'a>) {
        let Some((held, at)) = frame.place() else {
            self.close();
            self.list.extend([Part::Copied(gap), Part::Copied(frame.bytes)]);
            return;
        };
        let end = at + frame.bytes.len();
        if let Some((before, range)) = &mut self.open
            && std::ptr::eq(*before, held)
            && range.end + gap.len() == at
        {
            range.end = end;
            return;
        }
        self.close();
        if !gap.is_empty() {
            // Held, since so few bytes are not worth a buffer.
            self.list.push(Part::Held(Bytes::from_static(gap)));
        }
        self.open = Some((held, at..end));
    }

    fn close(&mut self) {
        if let Some((held, range)) = self.open.take() {
            self.list.push(Part::Held(held.slice(range)));
        }
    }

    /// All parts.
    pub(crate) fn finish(mut self) -> Vec<Part<'a>> {
        self.close();
        self.list
    }
}

/// The bytes that were added so far.
#[derive(Default)]
pub(crate) struct Content {
    /// The bytes that were copied.
    own: Option<LargeBuffer>,
    spans: Vec<Span>,
    len: usize,
}

enum Span {
    Own(Range<usize>),
    Held(Bytes),
}

impl Content {
    /// Bytes so far.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Number of bytes that are copied to its buffer.
    pub(crate) fn copied(&self) -> usize {
        self.own.as_ref().map_or(0, |own| own.len())
    }

    /// Adds parts. Bytes to be copied go to a buffer of `room` bytes, with the threads of a pool.
    pub(crate) fn append(
        &mut self,
        parts: &[Part<'_>],
        (buffers, room): (&LargeBuffers, usize),
        pool: Option<&ThreadPool>,
    ) {
        let is_held = |part: &Part<'_>| matches!(part, Part::Held(_));
        for run in parts.chunk_by(|a, b| !is_held(a) && !is_held(b)) {
            let bytes = run.iter().map(Part::len).sum::<usize>();
            if bytes == 0 {
                continue;
            }
            self.len += bytes;
            if let [Part::Held(bytes)] = run {
                self.spans.push(Span::Held(bytes.clone()));
                continue;
            }
            let copied: Vec<_> = run.iter().filter_map(Part::copied).collect();
            let own = self.own.get_or_insert_with(|| buffers.take(room));
            let start = own.len();
            append(own, &copied, pool);
            match self.spans.last_mut() {
                Some(Span::Own(range)) => range.end = own.len(),
                _ => self.spans.push(Span::Own(start..own.len())),
            }
        }
    }

    /// Its bytes, part after part.
    pub(crate) fn slices(&self) -> impl Iterator<Item = &[u8]> {
        let own = self.own.as_ref().map_or(&[][..], |own| &own[..]);
        self.spans.iter().map(move |span| match span {
            Span::Own(range) => &own[range.clone()],
            Span::Held(bytes) => bytes,
        })
    }

    /// Adds the bytes to a hash; if `in_pool`, with the threads of the pool that this is called in.
    pub(crate) fn hash(&self, hasher: &mut TreeHasher, in_pool: bool) {
        match in_pool {
            true => hasher.update_in_pool(&self.slices().collect::<Vec<_>>()),
            false => self.slices().for_each(|slice| hasher.update(slice)),
        }
    }

    /// Replaces its memory with what `keep` returns for all of it, which may be held for longer. Returns `false` if
    /// anything was copied or `keep` refuses.
    #[cfg(feature = "cuda")]
    pub(crate) fn hold(&mut self, keep: impl FnOnce(&[Bytes]) -> Option<Vec<Bytes>>) -> bool {
        let held = self.spans.iter().map(|span| match span {
            Span::Own(_) => None,
            Span::Held(bytes) => Some(bytes.clone()),
        });
        let kept = held.collect::<Option<Vec<_>>>().and_then(|held| keep(&held));
        let Some(kept) = kept else { return false };
        self.spans = kept.into_iter().map(Span::Held).collect();
        true
    }

    /// The same content in one buffer.
    pub(crate) fn copied_whole(self, buffers: &LargeBuffers) -> Self {
        if self.spans.len() <= 1 && self.copied() == self.len {
            return self;
        }
        let mut own = buffers.take(self.len);
        self.slices().for_each(|slice| own.extend_from_slice(slice));
        Self { spans: vec![Span::Own(0..own.len())], len: own.len(), own: Some(own) }
    }
}

impl<'a> Part<'a> {
    fn copied(&self) -> Option<&'a [u8]> {
        match self {
            Self::Copied(bytes) => Some(bytes),
            Self::Held(_) => None,
        }
    }

    /// Its first `at` bytes, and the rest.
    pub(crate) fn split_at(self, at: usize) -> (Self, Self) {
        match self {
            Self::Copied(bytes) => {
                let (first, rest) = bytes.split_at(at);
                (Self::Copied(first), Self::Copied(rest))
            }
            Self::Held(mut bytes) => {
                let rest = bytes.split_off(at);
                (Self::Held(bytes), Self::Held(rest))
            }
        }
    }
}

impl From<Content> for PutPayload {
    fn from(content: Content) -> Self {
        let Content { own, spans, .. } = content;
        let own = own.map_or_else(Bytes::new, Bytes::from);
        let part = |span| match span {
            Span::Own(range) => own.slice(range),
            Span::Held(bytes) => bytes,
        };
        spans.into_iter().map(part).collect()
    }
}

#[cfg(test)]
mod tests {
    use s4_engine::EncodedChunk;
    use s4_format::layout::MAX_PLANES;
    use s4_format::{CodecId, StreamEntry};

    use super::*;
    use crate::parallel::pool;

    const GAP: &[u8] = &[0; 16];

    fn frame<'a>(bytes: &'a [u8], held: Option<&'a Bytes>) -> EncodedFrame<'a> {
        let encoded = EncodedChunk {
            len: bytes.len(),
            plain: true,
            crc_encoded: 0,
            crc_raw: 0,
            shared: false,
            streams: [StreamEntry { codec: CodecId::RAW, param: 0, len: 0 }; MAX_PLANES],
        };
        EncodedFrame { tensor: 0, chunk: 0, encoded, bytes, held }
    }

    /// The parts of frames that are padded with zeros to multiples of 16, and all of their bytes.
    fn parts<'a>(frames: &[EncodedFrame<'a>]) -> (Vec<Part<'a>>, Vec<u8>) {
        let (mut parts, mut whole) = (Parts::default(), vec![]);
        for f in frames {
            let gap = &GAP[..whole.len().next_multiple_of(16) - whole.len()];
            parts.add(gap, f);
            whole.extend([gap, f.bytes].concat());
        }
        (parts.finish(), whole)
    }

    #[test]
    fn frames_that_follow_each_other_are_one_part() {
        let piece: Vec<u8> =
            [&[1; 40][..], &[0; 8], &[2; 16], &[3; 20], &[0; 12], &[4; 7]].concat();
        let (piece, other) = (Bytes::from(piece), Bytes::from(vec![5; 64]));
        let at = |start: usize, len: usize| frame(&piece[start..start + len], Some(&piece));
        let held = |list: &[Part<'_>]| list.iter().filter(|p| matches!(p, Part::Held(_))).count();
        let all = [at(0, 40), at(48, 16), at(64, 20), at(96, 7)];
        let (list, whole) = parts(&all);
        assert_eq!((list.len(), held(&list)), (1, 1));
        assert!(list[0].bytes() == whole && list[0].bytes() == &piece[..]);
        // In another order, with frames of other memory and copied ones in between.
        let own = vec![6; 33];
        let all =
            [at(48, 16), at(0, 40), frame(&own, None), frame(&other[..5], Some(&other)), at(96, 7)];
        let (list, whole) = parts(&all);
        assert_eq!(list.iter().flat_map(Part::bytes).copied().collect::<Vec<_>>(), whole);
        assert_eq!(list.iter().filter(|p| p.bytes().as_ptr() == own.as_ptr()).count(), 1);
    }

    #[test]
    fn content_is_what_was_added_held_or_copied() {
        let buffers = LargeBuffers::new(16 << 20);
        let large: Vec<u8> = (0..3 << 20).map(|i: u32| (i % 253) as u8).collect();
        let held = Bytes::from(large.clone());
        let threads = pool(3).unwrap();
        for order in [vec![0], vec![1], vec![0, 0, 1], vec![1, 0, 1, 1, 0], vec![2, 1, 2, 0, 2]] {
            let (mut content, mut whole) = (Content::default(), vec![]);
            for (i, kind) in order.iter().enumerate() {
                let part = match kind {
                    0 => Part::Copied(&large[i..]),
                    1 => Part::Held(held.slice(i..)),
                    _ => Part::Copied(&[]),
                };
                whole.extend_from_slice(part.bytes());
                let (first, second) = part.clone().split_at(part.len() / 3);
                assert_eq!([first.bytes(), second.bytes()].concat(), part.bytes());
                content.append(&[first, second], (&buffers, 16 << 20), threads.as_ref());
            }
            assert_eq!(content.len(), whole.len());
            assert!(content.slices().flatten().eq(&whole));
            let hash = |content: &Content, in_pool: bool| {
                let mut hasher = TreeHasher::default();
                content.hash(&mut hasher, in_pool);
                hasher.finalize()
            };
            assert_eq!(hash(&content, false), blake3::hash(&whole));
            let pool = threads.as_ref().unwrap();
            assert_eq!(pool.install(|| hash(&content, true)), blake3::hash(&whole));
            let copied = order.iter().all(|kind| *kind != 1);
            let before = content.slices().next().map(<[u8]>::as_ptr);
            let content = content.copied_whole(&buffers);
            assert_eq!(before == content.slices().next().map(<[u8]>::as_ptr), copied, "{order:?}");
            assert_eq!((content.copied(), content.slices().count()), (whole.len(), 1));
            let payload = PutPayload::from(content);
            assert!(Bytes::from(payload) == whole);
        }
    }
}
