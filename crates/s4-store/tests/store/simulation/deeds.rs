//! What the processes of a simulation do.

use s4_store::testing::Random;

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

/// How often each deed is done, relative to the others.
#[derive(Debug, PartialEq)]
pub(super) struct Mix([(Deed, u64); 10]);

pub(super) static USUAL: Mix = Mix([
    (Deed::Save, 12),
    (Deed::PublishRanks, 2),
    (Deed::Retire, 3),
    (Deed::Unretire, 1),
    (Deed::Rebase, 2),
    (Deed::Pin, 2),
    (Deed::GiveUp, 2),
    (Deed::Sweep, 2),
    (Deed::Resolve, 2),
    (Deed::Read, 4),
]);

/// What is listed changes more often: a repair must find out what was listed when.
pub(super) static CHANGING: Mix = Mix([
    (Deed::Save, 5),
    (Deed::PublishRanks, 1),
    (Deed::Retire, 2),
    (Deed::Unretire, 2),
    (Deed::Rebase, 2),
    (Deed::Pin, 1),
    (Deed::GiveUp, 1),
    (Deed::Sweep, 1),
    (Deed::Resolve, 1),
    (Deed::Read, 1),
]);

impl Mix {
    pub(super) fn choose(&self, random: &mut Random) -> Deed {
        let mut left = random.below(self.0.iter().map(|(_, share)| share).sum());
        for (deed, share) in self.0 {
            if left < share {
                return deed;
            }
            left -= share;
        }
        unreachable!("the shares add up")
    }
}
