//! The walk from a checkpoint to its base.

use std::collections::HashSet;
use std::fmt::Display;
use std::hash::Hash;

use s4_format::Error;

/// The chain of `head`: its base first, then each checkpoint after its parent, `head` last.
/// `parent` returns the parent of a checkpoint, `None` for a base; it is called once for each
/// checkpoint of the chain.
///
/// # Errors
/// - `Corrupt` if a checkpoint is its own ancestor.
/// - `Limit` if the chain has more than `max` checkpoints; `parent` is called for no more than
///   `max` of them.
/// - The errors of `parent`.
pub fn chain<Id, E>(
    head: Id,
    max: usize,
    mut parent: impl FnMut(&Id) -> Result<Option<Id>, E>,
) -> Result<Vec<Id>, E>
where
    Id: Clone + Eq + Hash + Display,
    E: From<Error>,
{
    let mut seen = HashSet::new();
    let mut newest_first = Vec::new();
    let mut next = Some(head);
    while let Some(id) = next {
        if !seen.insert(id.clone()) {
            return Err(Error::corrupt(format!("checkpoint {id} is its own ancestor")).into());
        }
        if newest_first.len() == max {
            let what = format!(
                "the chain has more than {max} checkpoints (checkpoint {id} exceeds the limit)"
            );
            return Err(Error::limit(what).into());
        }
        next = parent(&id)?;
        newest_first.push(id);
    }
    newest_first.reverse();
    Ok(newest_first)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The chain of `head`, where `parents` lists the parents of 0, 1, 2, ...
    fn walk(head: usize, max: usize, parents: &[Option<usize>]) -> Result<Vec<usize>, Error> {
        chain(head, max, |id| {
            let missing = || Error::truncated(format!("no checkpoint {id}"));
            parents.get(*id).copied().ok_or_else(missing)
        })
    }

    #[test]
    fn oldest_first() {
        let parents = [None, Some(3), Some(1), Some(0)];
        assert_eq!(walk(2, 4, &parents).unwrap(), [0, 3, 1, 2]);
        assert_eq!(walk(0, 1, &parents).unwrap(), [0]);
    }

    #[test]
    fn cycles_are_corrupt() {
        for (head, parents) in [(0, vec![Some(0)]), (0, vec![Some(1), Some(2), Some(1)])] {
            let error = walk(head, 100, &parents).unwrap_err();
            assert!(matches!(error, Error::Corrupt { .. }), "{error}");
            assert!(error.to_string().contains("its own ancestor"), "{error}");
        }
    }

    #[test]
    fn depth_is_bounded_before_more_is_read() {
        let mut asked = 0;
        let endless = |id: &u64| {
            asked += 1;
            Ok::<_, Error>(Some(id + 1))
        };
        let error = chain(0, 10, endless).unwrap_err();
        assert!(matches!(error, Error::Limit { .. }), "{error}");
        assert_eq!(asked, 10);
        assert!(matches!(walk(0, 0, &[None]), Err(Error::Limit { .. })));
    }

    #[test]
    fn errors_of_the_store_pass_through() {
        assert!(matches!(walk(0, 9, &[Some(7)]), Err(Error::Truncated { .. })));
    }
}
