//! What a handle saved last, and the values that it keeps for the next save.

use std::sync::Arc;

use s4_store::{Checkpoint, Reference};

use crate::parent::{MemoryParent, Parent};
use crate::reader::Reader;

/// The checkpoint that one handle saved last, and the values that it keeps for the next save.
#[derive(Default)]
pub(crate) struct SaveHistory {
    /// The checkpoint saved last.
    pub(super) last: Option<Reference>,
    /// Checkpoints whose values later saves may be deltas of.
    pub(super) held: Vec<Held>,
}

/// A checkpoint whose values are in memory.
pub(super) struct Held {
    pub(super) reference: Reference,
    /// Its number since the base.
    pub(super) number: u32,
    pub(super) values: ParentValues,
}

impl SaveHistory {
    /// Notes the saved checkpoint, and its values if they are kept.
    pub(crate) fn saved(&mut self, saved: &Checkpoint, kept: Option<ParentValues>) {
        let (reference, number) = (saved.reference(), saved.since_base());
        self.last = Some(reference);
        self.held.extend(kept.map(|values| Held { reference, number, values }));
    }
}

/// The values of a checkpoint, for deltas of it.
#[derive(Clone)]
pub(crate) enum ParentValues {
    /// In memory, raw or compressed.
    Memory(Arc<MemoryParent>),
    /// In the frames of the checkpoint and its ancestors: in memory, or in the store.
    Frames(Arc<Reader>),
}

impl ParentValues {
    pub(crate) fn parent(&self) -> Arc<dyn Parent> {
        match self {
            Self::Memory(values) => Arc::clone(values) as _,
            Self::Frames(reader) => Arc::clone(reader) as _,
        }
    }

    /// The open checkpoint, if the values are in its frames.
    pub(crate) fn reader(&self) -> Option<Arc<Reader>> {
        match self {
            Self::Memory(_) => None,
            Self::Frames(reader) => Some(Arc::clone(reader)),
        }
    }
}
