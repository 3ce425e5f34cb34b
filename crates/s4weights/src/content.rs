//! Bytes that follow each other, on their way to a file or an object: some copied, some where they are.

use std::ops::Range;

use bytes::Bytes;
use object_store::PutPayload;
use rayon::ThreadPool;
use s4_engine::EncodedFrame;

use crate::buffers::{LargeBuffer, LargeBuffers, append};

/// Fewer bytes are hashed by one thread before others have started.
const MUCH: usize = 128 << 10;

/// Bytes to be added.
#[derive(Clone)]
pub(crate) enum Part<'a> {
    /// They are copied.
    Copied(&'a [u8]),
    /// They are held where they are.
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

/// Chunks that follow each other, as few parts.
#[derive(Default)]
pub(crate) struct Parts<'a> {
    list: Vec<Part<'a>>,
    /// What the last part is of, and where it ends there.
    open: Option<(&'a Bytes, Range<usize>)>,
}

impl<'a> Parts<'a> {
    /// Adds a chunk behind zeros. Where it lies so behind the one before, both are one part.
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
        // No buffer is taken for so little.
        self.list.push(Part::Held(Bytes::from_static(gap)));
        self.open = Some((held, at..end));
    }

    fn close(&mut self) {
        if let Some((held, range)) = self.open.take() {
            self.list.push(Part::Held(held.slice(range)));
        }
    }

    /// All of them.
    pub(crate) fn finish(mut self) -> Vec<Part<'a>> {
        self.close();
        self.list
    }
}

/// What was added so far.
#[derive(Default)]
pub(crate) struct Content {
    /// What was copied.
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

    /// Bytes of its buffer.
    pub(crate) fn copied(&self) -> usize {
        self.own.as_ref().map_or(0, |own| own.len())
    }

    /// Adds parts. What is copied goes to a buffer of `room` bytes, with the threads of a pool.
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

    /// Adds it to a hash: `in_pool`, with the threads of the pool that this is called in.
    pub(crate) fn hash(&self, hasher: &mut blake3::Hasher, in_pool: bool) {
        for slice in self.slices() {
            match in_pool && slice.len() >= MUCH {
                true => hasher.update_rayon(slice),
                false => hasher.update(slice),
            };
        }
    }

    /// The same in one buffer.
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

    /// The first bytes of it, and the others.
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
