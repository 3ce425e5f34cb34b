//! State that codecs keep from one stream to the next.

use std::any::Any;
use std::fmt;

/// Buffers and library contexts that codecs reuse from stream to stream. It belongs to one thread at
/// a time; nothing in it changes what is written or read.
///
/// Each codec finds its own state by type, so a codec of another crate keeps its state here too.
#[derive(Default)]
pub struct Workspace {
    states: Vec<Box<dyn Any + Send + Sync>>,
}

impl Workspace {
    /// The state of type `T`, made on first use. Use a private type: whoever names the same type
    /// gets the same state.
    pub fn state<T: Any + Default + Send + Sync>(&mut self) -> &mut T {
        // A handful of states at most: looking through them costs less than hashing.
        let known = self.states.iter().position(|state| state.is::<T>());
        let at = known.unwrap_or_else(|| {
            self.states.push(Box::new(T::default()));
            self.states.len() - 1
        });
        self.states[at].downcast_mut().expect("the state at this place has this type")
    }
}

impl fmt::Debug for Workspace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Workspace").field("states", &self.states.len()).finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_are_found_by_type_and_kept() {
        let mut work = Workspace::default();
        work.state::<Vec<u8>>().push(7);
        *work.state::<u32>() = 5;
        assert_eq!((work.state::<Vec<u8>>().len(), *work.state::<u32>()), (1, 5));
        assert_eq!(work.states.len(), 2);
    }
}
