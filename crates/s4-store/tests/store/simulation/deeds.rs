//! What the processes of a simulation do.

use Deed::{GiveUp, Pin, PublishRanks, Read, Rebase, Resolve, Retire, Save, Sweep, Unretire};

/// What a process may do next.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Deed {
    Save,
    PublishRanks,
    Retire,
    Unretire,
    Rebase,
    Pin,
    GiveUp,
    Sweep,
    Resolve,
    Read,
}

/// Each deed is done as often as it is listed.
pub(super) const USUAL: &[Deed] = &[
    Save,
    Save,
    Save,
    Save,
    Save,
    Save,
    Save,
    Save,
    Save,
    Save,
    Save,
    Save,
    PublishRanks,
    PublishRanks,
    Retire,
    Retire,
    Retire,
    Unretire,
    Rebase,
    Rebase,
    Pin,
    Pin,
    GiveUp,
    GiveUp,
    Sweep,
    Sweep,
    Resolve,
    Resolve,
    Read,
    Read,
    Read,
    Read,
];

/// What is listed changes more often: a repair must find out what was listed when.
pub(super) const CHANGING: &[Deed] = &[
    Save,
    Save,
    Save,
    Save,
    Save,
    PublishRanks,
    Retire,
    Retire,
    Unretire,
    Unretire,
    Rebase,
    Rebase,
    Pin,
    GiveUp,
    Sweep,
    Resolve,
    Read,
];
