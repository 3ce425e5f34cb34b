//! The clocks. Decisions use steady clocks. The wall clock may be set at any moment, so it is only
//! for display, and for ages across a reboot.

use std::fs;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

/// Milliseconds since 1970 by the wall clock, for display; 0 before 1970.
pub(crate) fn now_ms() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_millis()).unwrap_or(i64::MAX)
}

/// The machine's uptime: a clock that outlives the process and that nobody can set.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Uptime {
    /// The boot that the uptime counts from: Linux's `boot_id`.
    pub boot: String,
    /// Milliseconds since that boot.
    pub ms: u64,
}

impl Uptime {
    /// The uptime now; `None` where the system does not report it.
    #[must_use]
    pub(crate) fn now() -> Option<Self> {
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
        let text = fs::read_to_string("/proc/uptime").ok()?;
        let seconds: f64 = text.split_whitespace().next()?.parse().ok()?;
        Some(Self { boot: boot.trim().to_owned(), ms: (seconds * 1000.0) as u64 })
    }
}

/// One moment, by every clock.
#[derive(Debug, Clone)]
pub(crate) struct Moment {
    /// By the steady clock of this process.
    pub steady: Instant,
    /// By the machine's uptime, where the system reports it.
    pub uptime: Option<Uptime>,
    /// By the wall clock, in milliseconds since 1970.
    pub wall_ms: i64,
}

impl Moment {
    /// Now.
    #[must_use]
    pub(crate) fn now() -> Self {
        Self { steady: Instant::now(), uptime: Uptime::now(), wall_ms: now_ms() }
    }

    /// When an event that another process recorded took place, by the steady clock of this process. Uses the
    /// uptime, or, after a reboot, the wall clock, which may have been set. Never in the future.
    #[must_use]
    pub(crate) fn of(&self, uptime: Option<&Uptime>, wall_ms: i64) -> Instant {
        let by_uptime = uptime.zip(self.uptime.as_ref()).and_then(|(then, now)| {
            (then.boot == now.boot).then(|| now.ms.checked_sub(then.ms)).flatten()
        });
        let by_wall = || u64::try_from(self.wall_ms.saturating_sub(wall_ms)).unwrap_or(0);
        let age = Duration::from_millis(by_uptime.unwrap_or_else(by_wall));
        self.steady.checked_sub(age).unwrap_or(self.steady)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_another_process_noted_is_as_old_as_the_machine_says() {
        let up = |boot: &str, ms| Some(Uptime { boot: boot.to_owned(), ms });
        let now = Moment { steady: Instant::now(), uptime: up("a", 90_000), wall_ms: 1_000_000 };
        let age = |uptime: Option<Uptime>, wall_ms| {
            now.steady.duration_since(now.of(uptime.as_ref(), wall_ms)).as_secs()
        };
        let day = 86_400_000;
        assert_eq!(age(up("a", 30_000), 940_000), 60);
        assert_eq!(age(up("a", 30_000), 940_000 - day), 60, "the clock was set forward");
        assert_eq!(age(up("a", 30_000), 940_000 + day), 60, "the clock was set back");
        assert_eq!(age(up("b", 30_000), 940_000), 60, "the machine was started again");
        assert_eq!(age(None, 940_000), 60);
        assert_eq!(age(None, 940_000 + day), 0, "nothing is accepted in the future");
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn the_machine_tells_since_when_it_runs() {
        let (first, second) = (Uptime::now().unwrap(), Uptime::now().unwrap());
        assert_eq!(first.boot, second.boot);
        assert!(first.boot.len() >= 32 && first.ms <= second.ms, "{first:?} {second:?}");
    }
}
