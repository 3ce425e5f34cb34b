//! Decides whether the next checkpoint should be a base, and otherwise which parent it gets.
//!
//! A delta is small but must be read together with its parents. These rules say when to end a
//! chain. They are plain arithmetic on a store's records of its listed checkpoints.

use std::fmt;

use crate::Tree;

/// The sizes of a listed checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CheckpointSize {
    /// Number of checkpoints saved since the base, this one included ([`Tree`]); 0 for the base.
    pub since_base: u32,
    /// Bytes that it takes in the store.
    pub stored: u64,
    /// Bytes of its tensors' values.
    pub raw: u64,
}

/// Facts about the next checkpoint that are known before it is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Next {
    /// Bytes of its tensors' values.
    pub raw: u64,
    /// Bytes of the tensors that are new, or whose dtype or shape differs from the parent's.
    pub changed: u64,
}

/// The rules.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Policy {
    /// The number of checkpoints that share a base, and the parent of each of them.
    pub tree: Tree,
    /// Number of the base's newest deltas that are checked for whether deltas still pay; 0: no
    /// check.
    pub recent: usize,
    /// A base is due if the recent deltas take, on average, at least this many thousandths of what
    /// the base takes.
    pub not_paying: u64,
    /// A base is due if at least this many thousandths of the next checkpoint's bytes are new or
    /// changed.
    pub changed: u64,
}

impl Policy {
    /// The default rules with the caller's tree.
    pub fn new(tree: Tree) -> Self {
        Self { tree, recent: 3, not_paying: 950, changed: 500 }
    }
}

/// The decision on the next checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decision {
    /// A delta.
    Delta {
        /// Number of checkpoints saved since the base, this one included.
        since_base: u32,
        /// Index of its parent in the `chain` that was given.
        parent: usize,
    },
    /// A base, for a reason.
    Base(Reason),
}

/// Why a base is due.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// There is no checkpoint before.
    First,
    /// The base already has as many checkpoints as may share it.
    Full,
    /// Recent deltas were hardly smaller than a base.
    NotPaying,
    /// Most of the checkpoint has no counterpart in the parent.
    Changed,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::First => "there is no earlier checkpoint",
            Self::Full => "the base already has the maximum number of checkpoints",
            Self::NotPaying => "recent deltas were hardly smaller than a base",
            Self::Changed => "most tensors are new or changed dtype or shape",
        })
    }
}

impl Policy {
    /// Decides on the next checkpoint. `chain` is that of the checkpoint that it follows, base
    /// first ([`crate::chain()`]), or empty if there is none. `deltas` are the deltas of that base,
    /// oldest first; only the last [`Policy::recent`] of them count.
    pub fn choose(
        &self,
        chain: &[CheckpointSize],
        deltas: &[CheckpointSize],
        next: Next,
    ) -> Decision {
        let (Some(base), Some(last)) = (chain.first(), chain.last()) else {
            return Decision::Base(Reason::First);
        };
        let since_base = last.since_base.saturating_add(1);
        let positions: Vec<u32> = chain.iter().map(|e| e.since_base).collect();
        let Some(parent) = self.tree.parent_in(since_base, &positions) else {
            return Decision::Base(Reason::Full);
        };
        if at_least(next.changed, next.raw, self.changed) {
            return Decision::Base(Reason::Changed);
        }
        let recent = &deltas[deltas.len().saturating_sub(self.recent)..];
        if !recent.is_empty() && recent.len() == self.recent && self.no_longer_pay(*base, recent) {
            return Decision::Base(Reason::NotPaying);
        }
        Decision::Delta { since_base, parent }
    }

    /// Compares stored bytes per byte of values, because the base may have had other tensors.
    fn no_longer_pay(&self, base: CheckpointSize, recent: &[CheckpointSize]) -> bool {
        let sum =
            |of: fn(&CheckpointSize) -> u64| recent.iter().map(|e| u128::from(of(e))).sum::<u128>();
        let (stored, raw) = (sum(|e| e.stored), sum(|e| e.raw));
        // stored / raw >= not_paying / 1000 * base.stored / base.raw, without division.
        let left = stored.saturating_mul(u128::from(base.raw)).saturating_mul(1000);
        let right =
            raw.saturating_mul(u128::from(base.stored)).saturating_mul(u128::from(self.not_paying));
        raw > 0 && base.raw > 0 && left >= right
    }
}

/// Whether `part` is at least `thousandths` of `whole`; false if `whole` is 0.
fn at_least(part: u64, whole: u64, thousandths: u64) -> bool {
    whole > 0 && u128::from(part) * 1000 >= u128::from(whole) * u128::from(thousandths)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAME: Next = Next { raw: 1000, changed: 0 };

    fn policy() -> Policy {
        Policy::new(Tree::new(16, 2))
    }

    fn sizes(stored: &[u64]) -> Vec<CheckpointSize> {
        (0..)
            .zip(stored)
            .map(|(since_base, &stored)| CheckpointSize { since_base, stored, raw: 1000 })
            .collect()
    }

    /// The choice after checkpoints of these sizes, of which the first is the base of the others.
    fn after(policy: Policy, stored: &[u64], next: Next) -> Decision {
        let all = sizes(stored);
        let mut chain = all[..1].to_vec();
        chain.extend(all.last().filter(|e| e.since_base > 0));
        policy.choose(&chain, &all[1..], next)
    }

    fn delta(since_base: u32, parent: usize) -> Decision {
        Decision::Delta { since_base, parent }
    }

    #[test]
    fn the_first_checkpoint_is_a_base_and_the_next_a_delta() {
        assert_eq!(policy().choose(&[], &[], SAME), Decision::Base(Reason::First));
        assert_eq!(after(policy(), &[700], SAME), delta(1, 0));
    }

    #[test]
    fn parents_are_those_of_the_tree_until_the_base_has_enough() {
        let mut chain = sizes(&[700]);
        let mut parents = vec![];
        while let Decision::Delta { since_base, parent } = policy().choose(&chain, &[], SAME) {
            parents.push(chain[parent].since_base);
            chain.truncate(parent + 1);
            chain.push(CheckpointSize { since_base, ..chain[0] });
        }
        assert_eq!(parents, [0, 0, 0, 0, 4, 4, 4, 0, 8, 8, 8, 0, 12, 12, 12]);
        assert_eq!(policy().choose(&chain, &[], SAME), Decision::Base(Reason::Full));
        let alone = Policy::new(Tree::new(1, 2));
        assert_eq!(after(alone, &[700], SAME), Decision::Base(Reason::Full));
        chain[1].since_base = u32::MAX;
        assert_eq!(policy().choose(&chain, &[], SAME), Decision::Base(Reason::Full));
    }

    #[test]
    fn deltas_that_no_longer_pay_end_the_chain() {
        let p = policy();
        assert_eq!(after(p, &[700, 690, 690], SAME), delta(3, 0));
        assert_eq!(after(p, &[700, 690, 690, 690], SAME), Decision::Base(Reason::NotPaying));
        // One of the recent deltas still pays.
        assert_eq!(after(p, &[700, 690, 690, 300], SAME), delta(4, 0));
        // Only the newest deltas count, and sizes are compared per byte of values.
        assert_eq!(after(p, &[700, 690, 690, 690, 300], SAME), delta(5, 1));
        let mut grown = sizes(&[700, 690, 690, 690]);
        grown[1..].iter_mut().for_each(|e| e.raw = 2000);
        assert_eq!(p.choose(&[grown[0], grown[3]], &grown[1..], SAME), delta(4, 0));
        let exact = Policy { recent: 1, not_paying: 900, ..p };
        assert_eq!(after(exact, &[1000, 899], SAME), delta(2, 0));
        assert_eq!(after(exact, &[1000, 900], SAME), Decision::Base(Reason::NotPaying));
        let never = Policy { recent: 0, ..p };
        assert_eq!(after(never, &[700, 700, 700], SAME), delta(3, 0));
    }

    #[test]
    fn a_checkpoint_that_is_mostly_new_is_a_base() {
        let next = |changed| Next { raw: 1000, changed };
        assert_eq!(after(policy(), &[700], next(499)), delta(1, 0));
        assert_eq!(after(policy(), &[700], next(500)), Decision::Base(Reason::Changed));
        assert_eq!(after(policy(), &[700], Next { raw: 0, changed: 0 }), delta(1, 0));
    }

    #[test]
    fn numbers_of_any_size_do_not_overflow() {
        let huge = [CheckpointSize { since_base: 0, stored: u64::MAX, raw: u64::MAX }; 5];
        let next = Next { raw: u64::MAX, changed: 1 };
        assert_eq!(policy().choose(&huge, &huge, next), Decision::Base(Reason::NotPaying));
        let empty = [CheckpointSize { since_base: 0, stored: 0, raw: 0 }; 5];
        assert_eq!(policy().choose(&empty, &empty, SAME), delta(1, 1));
    }
}
