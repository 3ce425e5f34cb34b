//! The choice of a delta's parent among earlier checkpoints.
//!
//! The checkpoints that share a base are numbered: the base is 0, the next one 1, and so on. If
//! each were a delta of the one before, restoring the last would decode all of them; if each were a
//! delta of the base, deltas would soon be as large as a base. As a compromise, numbers are written
//! in a radix `g`, and the parent's number is the checkpoint's own with the lowest nonzero digit
//! cleared. With 16 checkpoints and 2 hops, `g` is 4: 4, 8 and 12 are deltas of the base, 5, 6 and
//! 7 of 4.
//!
//! The parent of a number is always the number before it or an ancestor of that one, so a writer
//! finds the parent in the chain of the checkpoint that it saved last.

/// The rule for one number of checkpoints and one number of hops.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tree {
    chain: u32,
    hops: u32,
    /// 1 means that each checkpoint is a delta of the one before.
    radix: u32,
}

impl Tree {
    /// At most `chain` checkpoints share a base, which counts as one of them, and at most `hops`
    /// hops lead from any of them down to it. Both are at least 1: 0 is taken as 1. With `hops` of
    /// `chain - 1` or more, each checkpoint is a delta of the one before; with 1, each is a delta
    /// of the base.
    pub fn new(chain: u32, hops: u32) -> Self {
        let (chain, hops) = (chain.max(1), hops.max(1));
        let reaches = |radix: &u32| u64::from(*radix).saturating_pow(hops) >= u64::from(chain);
        let radix = match hops >= chain - 1 {
            true => 1,
            // A radix of `chain` reaches it with one digit.
            false => (2..chain).find(reaches).unwrap_or(chain),
        };
        Self { chain, hops, radix }
    }

    /// The most checkpoints that share a base, which counts as one of them.
    pub fn chain(&self) -> u32 {
        self.chain
    }

    /// The most hops from a checkpoint down to its base.
    pub fn hops(&self) -> u32 {
        self.hops
    }

    /// The number that `number` is a delta of; `None` for a base: number 0, and any number from
    /// `chain` on, where a new base is due.
    pub fn parent(&self, number: u32) -> Option<u32> {
        if number == 0 || number >= self.chain {
            return None;
        }
        let place = self.place(number) * u64::from(self.radix);
        Some(if self.radix == 1 { number - 1 } else { number - (u64::from(number) % place) as u32 })
    }

    /// The greatest number that is a delta of `number`, if there is one: until then the values of
    /// `number` are still needed.
    pub fn last_child(&self, number: u32) -> Option<u32> {
        if number >= self.chain {
            return None;
        }
        let (first, radix) = (u64::from(number), u64::from(self.radix));
        let left = u64::from(self.chain) - 1 - first;
        if self.radix == 1 {
            return (left > 0).then(|| number + 1);
        }
        // A child differs from `number` in one digit, below the lowest nonzero digit.
        let mut place = match number {
            0 => self.powers().last().unwrap_or(1) * radix,
            _ => self.place(number),
        };
        while place > 1 {
            place /= radix;
            let digit = (left / place).min(radix - 1);
            if digit > 0 {
                return u32::try_from(first + digit * place).ok();
            }
        }
        None
    }

    /// The most checkpoints whose values are needed at the same time, for deltas still to come.
    pub fn parents(&self) -> u32 {
        match (self.chain, self.radix) {
            (1, _) => 0,
            (_, 1) => 1,
            // One for each digit of a number.
            _ => u32::try_from(self.powers().count()).unwrap_or(u32::MAX),
        }
    }

    /// The place values of the digits, for a radix of 2 or more.
    fn powers(&self) -> impl Iterator<Item = u64> {
        let (chain, radix) = (u64::from(self.chain), u64::from(self.radix));
        std::iter::successors(Some(1), move |p| Some(p * radix)).take_while(move |p| *p < chain)
    }

    /// The index of the parent of `number` in `chain`, which holds the numbers of the last saved
    /// checkpoint's chain, base first. Whatever rule that chain followed, the parent is at most
    /// `hops - 1` hops from the base. `None` if a base is due or `chain` is empty.
    pub fn parent_in(&self, number: u32, chain: &[u32]) -> Option<usize> {
        let parent = self.parent(number)?;
        let near = chain.len().min(self.hops as usize);
        // A base can be the parent of any number: one that was a delta before counts as number 0.
        chain[..near].iter().rposition(|n| *n <= parent).or((near > 0).then_some(0))
    }

    /// The place value of the lowest nonzero digit of a number that is not 0.
    fn place(&self, number: u32) -> u64 {
        let radix = u64::from(self.radix);
        let mut place = 1;
        while self.radix > 1 && u64::from(number).is_multiple_of(place * radix) {
            place *= radix;
        }
        place
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parents(tree: Tree) -> Vec<u32> {
        (1..tree.chain()).map(|n| tree.parent(n).unwrap()).collect()
    }

    #[test]
    fn sixteen_in_two_hops() {
        let tree = Tree::new(16, 2);
        assert_eq!(parents(tree), [0, 0, 0, 0, 4, 4, 4, 0, 8, 8, 8, 0, 12, 12, 12]);
        let last: Vec<_> = [0, 4, 8, 12, 1, 7, 15].map(|n| tree.last_child(n)).into();
        assert_eq!(last, [Some(12), Some(7), Some(11), Some(15), None, None, None]);
        assert_eq!(tree.parents(), 2);
    }

    #[test]
    fn the_ends_are_a_chain_and_a_star() {
        for hops in [15, 16, 100] {
            assert_eq!(parents(Tree::new(16, hops)), (0..15).collect::<Vec<_>>());
            assert_eq!(Tree::new(16, hops).parents(), 1);
        }
        assert_eq!(parents(Tree::new(16, 1)), [0; 15]);
        assert_eq!(Tree::new(16, 1).last_child(0), Some(15));
        for tree in [Tree::new(1, 2), Tree::new(0, 0)] {
            assert_eq!((tree.parent(1), tree.last_child(0), tree.parents()), (None, None, 0));
        }
    }

    /// Trees of many chain lengths and hops.
    fn trees() -> impl Iterator<Item = Tree> {
        let chains = (1..70).chain([100, 127, 128, 1000, 4096]);
        chains.flat_map(|chain| (1..8).chain([chain / 2, chain]).map(move |h| Tree::new(chain, h)))
    }

    #[test]
    fn parents_exist_are_earlier_and_hops_are_bounded() {
        for tree in trees() {
            let mut hops = vec![0];
            for n in 1..tree.chain() {
                let parent = tree.parent(n).unwrap();
                assert!(parent < n, "{tree:?}: {n} is a delta of {parent}");
                hops.push(hops[parent as usize] + 1);
                assert!(hops[n as usize] <= tree.hops(), "{tree:?}: {n}");
            }
            assert_eq!(
                [tree.parent(0), tree.parent(tree.chain()), tree.parent(u32::MAX)],
                [None; 3]
            );
        }
    }

    #[test]
    fn a_resuming_writer_finds_the_parent_in_its_chain() {
        for tree in trees() {
            let mut chain = vec![0];
            for n in 1..tree.chain() {
                let at = tree.parent_in(n, &chain).unwrap();
                assert_eq!(Some(chain[at]), tree.parent(n), "{tree:?}");
                chain.truncate(at + 1);
                chain.push(n);
            }
            assert_eq!(tree.parent_in(tree.chain(), &chain), None);
        }
    }

    #[test]
    fn last_children_are_the_last() {
        for tree in trees() {
            let children = |n| (1..tree.chain()).filter(move |c| tree.parent(*c) == Some(n));
            let mut most = 0;
            for n in 0..tree.chain() {
                assert_eq!(tree.last_child(n), children(n).next_back(), "{tree:?}: {n}");
                let wanted = |p: &u32| tree.last_child(*p).is_some_and(|last| last > n);
                most = most.max((0..=n).filter(wanted).count());
            }
            assert!(most <= tree.parents() as usize, "{tree:?}: {most} at once");
            assert_eq!(tree.last_child(u32::MAX), None);
        }
    }

    #[test]
    fn lines_of_other_rules_are_continued_within_the_hops() {
        for tree in trees() {
            // Each a delta of the one before; a chain whose parent was rebased; arbitrary numbers.
            let chains: [&[u32]; 5] =
                [&[0, 1, 2, 3, 4, 5], &[0, 9, 10], &[7, 3, 9], &[u32::MAX; 9], &[5]];
            for chain in chains {
                for n in 1..tree.chain() {
                    let at = tree.parent_in(n, chain).unwrap();
                    assert!(at < chain.len() && at < tree.hops() as usize, "{tree:?}: {n}");
                }
                assert_eq!(tree.parent_in(0, chain), None);
            }
            assert_eq!(tree.parent_in(1, &[]), None);
        }
    }
}
