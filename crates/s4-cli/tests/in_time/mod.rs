//! Bounds on time that hold on a machine that is busy, or stalls for seconds.

use std::time::Instant;

/// The result of the first of some tries that takes less than `limit` seconds: a stall delays some of them, a defect
/// all.
pub(crate) fn in_time<T>(limit: f64, mut work: impl FnMut() -> T) -> T {
    let mut took = vec![];
    while took.len() < 5 {
        let start = Instant::now();
        let result = work();
        took.push(start.elapsed().as_secs_f64());
        if took.last().is_some_and(|last| *last < limit) {
            return result;
        }
    }
    panic!("took {took:?} s, not {limit} s");
}
