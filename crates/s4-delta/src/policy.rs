//! When the next checkpoint should be a base.
//!
//! A delta is small but must be read together with its parents. These are the rules for ending a
//! chain; all are plain arithmetic on what a store knows of the checkpoints that it lists.

use std::fmt;

/// A checkpoint of the chain that the next one would extend.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    /// Bytes that it takes where it is stored.
    pub stored: u64,
    /// Bytes of its tensors' values.
    pub raw: u64,
}

/// What is known of the next checkpoint before it is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Next {
    /// Bytes of its tensors' values.
    pub raw: u64,
    /// Bytes of those of them that are new, or of another dtype or shape than in the parent.
    pub changed: u64,
}

/// The rules.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Policy {
    /// A base after so many checkpoints; `None`: the other rules decide.
    pub every: Option<u32>,
    /// Most checkpoints of a chain, the base counted.
    pub max_chain: u32,
    /// Deltas that are looked at to see whether they pay: the newest ones of the chain.
    pub recent: usize,
    /// A base if the recent deltas take, on average, this many parts in a thousand or more of what
    /// a base takes.
    pub not_paying: u64,
    /// A base if this many parts in a thousand or more of the next checkpoint are new.
    pub changed: u64,
}

impl Default for Policy {
    fn default() -> Self {
        Self { every: None, max_chain: 16, recent: 3, not_paying: 950, changed: 500 }
    }
}

/// What the next checkpoint should be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Choice {
    /// A delta against the newest checkpoint.
    Delta,
    /// A base, for a reason.
    Base(Reason),
}

/// Why a base is due.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// There is no checkpoint before.
    First,
    /// One is written after a fixed number of checkpoints.
    Every,
    /// The chain is as long as is allowed.
    Long,
    /// Recent deltas were hardly smaller than a base.
    NotPaying,
    /// Most of the checkpoint has no counterpart in the parent.
    Changed,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::First => "there is no checkpoint before",
            Self::Every => "a base is due after this many checkpoints",
            Self::Long => "the chain is as long as is allowed",
            Self::NotPaying => "recent deltas were hardly smaller than a base",
            Self::Changed => "most tensors are new or changed dtype or shape",
        })
    }
}

impl Policy {
    /// What the next checkpoint should be. `chain` is the chain of the newest checkpoint, its base
    /// first ([`crate::chain`]); empty if there is none.
    pub fn choose(&self, chain: &[Entry], next: Next) -> Choice {
        let Some((base, deltas)) = chain.split_first() else { return Choice::Base(Reason::First) };
        let length = u32::try_from(chain.len()).unwrap_or(u32::MAX);
        if self.every.is_some_and(|n| length >= n.max(1)) {
            return Choice::Base(Reason::Every);
        }
        if length >= self.max_chain {
            return Choice::Base(Reason::Long);
        }
        if at_least(next.changed, next.raw, self.changed) {
            return Choice::Base(Reason::Changed);
        }
        let recent = &deltas[deltas.len().saturating_sub(self.recent)..];
        if !recent.is_empty() && recent.len() == self.recent && self.no_longer_pay(*base, recent) {
            return Choice::Base(Reason::NotPaying);
        }
        Choice::Delta
    }

    /// Compares sizes for each byte of values: the base may have had other tensors.
    fn no_longer_pay(&self, base: Entry, recent: &[Entry]) -> bool {
        let sum = |of: fn(&Entry) -> u64| recent.iter().map(|e| u128::from(of(e))).sum::<u128>();
        let (stored, raw) = (sum(|e| e.stored), sum(|e| e.raw));
        // stored / raw >= not_paying / 1000 * base.stored / base.raw, without division.
        let left = stored.saturating_mul(u128::from(base.raw)).saturating_mul(1000);
        let right =
            raw.saturating_mul(u128::from(base.stored)).saturating_mul(u128::from(self.not_paying));
        raw > 0 && base.raw > 0 && left >= right
    }
}

/// Whether `part` is `thousandths` of `whole` or more; nothing of nothing is not.
fn at_least(part: u64, whole: u64, thousandths: u64) -> bool {
    whole > 0 && u128::from(part) * 1000 >= u128::from(whole) * u128::from(thousandths)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAME: Next = Next { raw: 1000, changed: 0 };

    fn chain(stored: &[u64]) -> Vec<Entry> {
        stored.iter().map(|&stored| Entry { stored, raw: 1000 }).collect()
    }

    #[test]
    fn the_first_checkpoint_is_a_base_and_the_next_a_delta() {
        let p = Policy::default();
        assert_eq!(p.choose(&[], SAME), Choice::Base(Reason::First));
        assert_eq!(p.choose(&chain(&[700]), SAME), Choice::Delta);
    }

    #[test]
    fn bases_come_after_a_number_of_checkpoints_and_at_the_longest_chain() {
        let p = Policy { every: Some(3), ..Policy::default() };
        assert_eq!(p.choose(&chain(&[700, 300]), SAME), Choice::Delta);
        assert_eq!(p.choose(&chain(&[700, 300, 300]), SAME), Choice::Base(Reason::Every));
        let always = Policy { every: Some(0), ..p };
        assert_eq!(always.choose(&chain(&[700]), SAME), Choice::Base(Reason::Every));
        let p = Policy::default();
        let mut long = vec![700];
        long.extend([300; 14]);
        assert_eq!(p.choose(&chain(&long), SAME), Choice::Delta);
        long.push(300);
        assert_eq!(p.choose(&chain(&long), SAME), Choice::Base(Reason::Long));
    }

    #[test]
    fn deltas_that_no_longer_pay_end_the_chain() {
        let p = Policy::default();
        assert_eq!(p.choose(&chain(&[700, 690, 690]), SAME), Choice::Delta);
        assert_eq!(p.choose(&chain(&[700, 690, 690, 690]), SAME), Choice::Base(Reason::NotPaying));
        // One of them does.
        assert_eq!(p.choose(&chain(&[700, 690, 690, 300]), SAME), Choice::Delta);
        // Only the newest count, and sizes are compared for each byte of values.
        assert_eq!(p.choose(&chain(&[700, 690, 690, 690, 300]), SAME), Choice::Delta);
        let mut grown = chain(&[700, 690, 690, 690]);
        grown[1..].iter_mut().for_each(|e| e.raw = 2000);
        assert_eq!(p.choose(&grown, SAME), Choice::Delta);
        let exact = Policy { recent: 1, not_paying: 900, ..p };
        assert_eq!(exact.choose(&chain(&[1000, 899]), SAME), Choice::Delta);
        assert_eq!(exact.choose(&chain(&[1000, 900]), SAME), Choice::Base(Reason::NotPaying));
        let never = Policy { recent: 0, ..p };
        assert_eq!(never.choose(&chain(&[700, 700, 700]), SAME), Choice::Delta);
    }

    #[test]
    fn a_checkpoint_that_is_mostly_new_is_a_base() {
        let p = Policy::default();
        let next = |changed| Next { raw: 1000, changed };
        assert_eq!(p.choose(&chain(&[700]), next(499)), Choice::Delta);
        assert_eq!(p.choose(&chain(&[700]), next(500)), Choice::Base(Reason::Changed));
        assert_eq!(p.choose(&chain(&[700]), Next { raw: 0, changed: 0 }), Choice::Delta);
    }

    #[test]
    fn numbers_of_any_size_do_not_overflow() {
        let huge = [Entry { stored: u64::MAX, raw: u64::MAX }; 5];
        let next = Next { raw: u64::MAX, changed: 1 };
        assert_eq!(Policy::default().choose(&huge, next), Choice::Base(Reason::NotPaying));
        let empty = [Entry { stored: 0, raw: 0 }; 5];
        assert_eq!(Policy::default().choose(&empty, SAME), Choice::Delta);
    }
}
