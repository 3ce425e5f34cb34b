//! A checkpoint as it is listed.

use std::collections::BTreeMap;

use s4weights::store::{Checkpoint, CheckpointId, State};
use serde::Serialize;

use super::text;

/// A checkpoint as a listing shows it; also the form of `--json`.
#[derive(Debug, Serialize)]
pub(crate) struct Row {
    pub(crate) step: u64,
    pub(crate) id: CheckpointId,
    /// `base` or `delta`.
    pub(crate) kind: &'static str,
    /// The checkpoint that it is a delta of.
    pub(crate) of: Option<CheckpointId>,
    pub(crate) of_step: Option<u64>,
    /// Number of checkpoints that restoring it reads, including itself.
    pub(crate) chain: usize,
    /// Number of deltas among these: the hops down to the base.
    pub(crate) hops: usize,
    /// Its position among the checkpoints that share its base; the base has 0.
    pub(crate) since_base: u32,
    /// Bytes that it takes in the store.
    pub(crate) bytes: u64,
    pub(crate) raw_bytes: u64,
    pub(crate) ratio: Option<f64>,
    pub(crate) objects: u32,
    pub(crate) pinned: bool,
    pub(crate) published: String,
    pub(crate) metrics: BTreeMap<String, f64>,
    pub(crate) tags: BTreeMap<String, String>,
}

impl Row {
    pub(crate) fn new(state: &State, c: &Checkpoint) -> Self {
        let bytes = stored(c);
        let chain = state.chain(c.id()).map_or(0, |chain| chain.len());
        Self {
            step: c.step(),
            id: c.id(),
            kind: if c.base.is_some() { "delta" } else { "base" },
            of: c.base,
            of_step: c.base.and_then(|id| state.get(id)).map(Checkpoint::step),
            chain,
            hops: chain.saturating_sub(1),
            since_base: c.since_base(),
            bytes,
            raw_bytes: c.about.raw_len,
            ratio: text::ratio(c.about.raw_len, bytes),
            objects: c.about.objects,
            pinned: c.pinned,
            published: text::when(c.at_ms),
            metrics: c.about.metrics.clone(),
            tags: c.about.tags.clone(),
        }
    }

    /// `base`, or `delta of 120`.
    pub(crate) fn kind_text(&self) -> String {
        match self.of_step {
            Some(step) => format!("delta of {step}"),
            None => self.kind.to_owned(),
        }
    }
}

/// Bytes that a checkpoint takes in the store: data objects and manifest.
pub(crate) fn stored(c: &Checkpoint) -> u64 {
    c.about.data_len.saturating_add(c.about.manifest_len)
}
