//! The faults of a network between a client and a server.

use std::time::Duration;

use s4_store::testing::Random;

/// One thing that goes wrong with one request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Fault {
    /// The connection is reset; the server never sees the request.
    ResetBefore,
    /// The server handles the request, then the connection is reset.
    ResetAfter,
    /// The server handles the request, then the connection ends without an answer.
    NoAnswer,
    /// The request reaches the server late.
    DelayBefore,
    /// The answer reaches the client late.
    DelayAfter,
    /// Nothing happens for seconds, then the connection ends; the server saw nothing.
    StallBefore,
    /// The server handles the request; nothing is heard for seconds, then the connection ends.
    StallAfter,
    /// The connection ends in the middle of the answer.
    Truncate,
    /// A gateway answers with this status; the server never sees the request.
    StatusBefore(u16),
    /// The server handles the request, then a gateway answers with this status.
    StatusAfter(u16),
    /// A write is done, and done again seconds later.
    Duplicate,
    /// The connection is reset, but the write still reaches the server seconds later.
    LandsLate,
}

impl Fault {
    /// All of them.
    pub(crate) const ALL: [Self; 16] = [
        Self::ResetBefore,
        Self::ResetAfter,
        Self::NoAnswer,
        Self::DelayBefore,
        Self::DelayAfter,
        Self::StallBefore,
        Self::StallAfter,
        Self::Truncate,
        Self::StatusBefore(500),
        Self::StatusBefore(503),
        Self::StatusBefore(409),
        Self::StatusAfter(500),
        Self::StatusAfter(503),
        Self::StatusAfter(409),
        Self::Duplicate,
        Self::LandsLate,
    ];

    /// Those without long pauses, for attacks of many requests.
    pub(crate) const QUICK: [Self; 8] = [
        Self::ResetBefore,
        Self::ResetAfter,
        Self::NoAnswer,
        Self::StatusBefore(503),
        Self::StatusBefore(409),
        Self::StatusAfter(500),
        Self::StatusAfter(503),
        Self::Duplicate,
    ];
}

/// How a server treats the condition "only if it is absent".
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Condition {
    /// It is honoured.
    Honoured,
    /// It is ignored.
    Ignored,
    /// The server checks whether the object exists, and writes after this pause.
    CheckThenWrite(Duration),
}

/// When faults happen.
#[derive(Debug, Clone)]
pub(crate) struct Behaviour {
    /// The faults to choose from.
    pub(crate) faults: Vec<Fault>,
    /// One request in this many is hit; 0: none.
    pub(crate) one_in: u64,
    /// Once in this many requests, on average, all connections are reset for up to three seconds; 0: never.
    pub(crate) outage_one_in: u64,
    /// The only request to be hit, counted from 0, whatever the other members say.
    pub(crate) only: Option<(u64, Fault)>,
    /// How conditions are treated.
    pub(crate) condition: Condition,
}

impl Behaviour {
    /// No faults at all.
    pub(crate) fn honest() -> Self {
        let (faults, condition) = (Vec::new(), Condition::Honoured);
        Self { faults, one_in: 0, outage_one_in: 0, only: None, condition }
    }

    /// One of `faults` for one request in `one_in`.
    pub(crate) fn faulty(faults: &[Fault], one_in: u64) -> Self {
        Self { faults: faults.to_vec(), one_in, ..Self::honest() }
    }

    /// One fault, for one request.
    pub(crate) fn once(number: u64, fault: Fault) -> Self {
        Self { only: Some((number, fault)), ..Self::honest() }
    }

    /// No faults, on a server that treats conditions this way.
    pub(crate) fn lying(condition: Condition) -> Self {
        Self { condition, ..Self::honest() }
    }

    /// The fault of request number `n`, if any.
    pub(super) fn draw(&self, n: u64, random: &mut Random) -> Option<Fault> {
        if let Some((only, fault)) = self.only {
            return (only == n).then_some(fault);
        }
        if self.one_in == 0 || self.faults.is_empty() || !random.one_in(self.one_in) {
            return None;
        }
        let chosen = random.below(self.faults.len() as u64) as usize;
        self.faults.get(chosen).copied()
    }
}
