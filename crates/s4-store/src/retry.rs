//! Repeats requests until they succeed, fail permanently, or run out of time.

use std::future::Future;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use object_store::client::HttpErrorKind;
use object_store::retry::{RetryContext, RetryFailure, RetryPolicy};
use tokio::time::Instant;

use crate::cause::Cause;
use crate::error::{Error, Result};
use crate::failure::{Answer, Failure};
use crate::options::Retry;

/// The slowest transfer that is not given up, in bytes per second.
const SLOWEST: u64 = 64 << 10;
/// Failures that go on for this long cause a warning, and another one each time this long has
/// passed.
const WARN_AFTER: Duration = Duration::from_secs(5);

/// Progress of a request that returns a series of answers, such as a listing. A retry starts the series over.
#[derive(Debug, Default)]
pub(crate) struct Progress(Mutex<Answers>);

#[derive(Debug, Default, Clone, Copy)]
struct Answers {
    /// Answers in this try, and the most in any try.
    seen: u64,
    most: u64,
    /// The time of the last answer, and of the last one that was further than in any try before.
    moved: Option<Instant>,
    gained: Option<Instant>,
}

impl Progress {
    /// Notes an answer.
    pub(crate) fn made(&self) {
        let mut answers = self.lock();
        let now = Some(Instant::now());
        answers.seen += 1;
        answers.moved = now;
        if answers.seen > answers.most {
            (answers.most, answers.gained) = (answers.seen, now);
        }
    }

    fn begin(&self) {
        self.lock().seen = 0;
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Answers> {
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }
}

/// Repeats requests to one object store.
#[derive(Debug)]
pub struct Retrier {
    retry: Retry,
    /// Whether the server has ever answered.
    met: AtomicBool,
    /// The time of the last warning.
    warned: Mutex<Option<Instant>>,
}

impl Retrier {
    /// A retrier with these rules, for a server that has not been reached yet.
    #[must_use]
    pub fn new(retry: Retry) -> Self {
        Self { retry, met: AtomicBool::new(false), warned: Mutex::new(None) }
    }

    pub(crate) fn retry(&self) -> &Retry {
        &self.retry
    }

    /// Makes a request that may be repeated, with retries. `bytes` is how much it transfers.
    ///
    /// # Errors
    /// [`Error::Missing`] if there is no such object; [`Error::Storage`] after a failure that will not
    /// pass; [`Error::Deadline`] when time is up.
    pub async fn run<T, F>(
        &self,
        action: &'static str,
        key: &str,
        bytes: u64,
        request: impl FnMut() -> F,
    ) -> Result<T>
    where
        F: Future<Output = object_store::Result<T>>,
    {
        self.run_while_moving(action, key, bytes, &Progress::default(), request).await
    }

    /// As [`Retrier::run`], but each answer reported to `progress` restarts the time limit, so a long listing may take as
    /// long as answers keep coming. It is repeated until no try has got further for that long.
    pub(crate) async fn run_while_moving<T, F>(
        &self,
        action: &'static str,
        key: &str,
        bytes: u64,
        progress: &Progress,
        mut request: impl FnMut() -> F,
    ) -> Result<T>
    where
        F: Future<Output = object_store::Result<T>>,
    {
        let begun = Instant::now();
        let moving = Duration::from_secs(bytes / SLOWEST);
        let moved = || progress.lock().moved.unwrap_or(begun);
        let gained = || progress.lock().gained.unwrap_or(begun);
        let late = |last| {
            let limit = round(gained().elapsed());
            Error::Deadline { action, key: key.to_owned(), limit, last }
        };
        let mut last = None;
        let again = self.retry.attempts > 1;
        for attempt in 0.. {
            progress.begin();
            let mut trying = std::pin::pin!(request());
            // The second try has some time even if the first one used up all of it.
            let least = match attempt {
                1 => Instant::now() + Retry::second_try(self.patience(last.as_ref())),
                _ => begun,
            };
            let end_of_try = |last: Option<&Failure>| match attempt {
                0 if again => moved() + self.retry.first_try().min(self.patience(last)) + moving,
                _ => least.max(moved() + self.patience(last) + moving),
            };
            let outcome = loop {
                let end = end_of_try(last.as_ref());
                match tokio::time::timeout_at(end, &mut trying).await {
                    Ok(outcome) => break Some(outcome),
                    Err(_) if end_of_try(last.as_ref()) > end => {}
                    Err(_) => break None,
                }
            };
            let failure = match outcome {
                Some(Ok(value)) => {
                    self.met.store(true, Ordering::Relaxed);
                    return Ok(value);
                }
                Some(Err(error)) => self.failure(action, key, attempt, &error)?,
                None if attempt == 0 && again => Failure::silent(),
                None => return Err(late(last.unwrap_or_else(Failure::silent))),
            };
            let end = gained() + self.patience(Some(&failure));
            let left = end.saturating_duration_since(Instant::now());
            if left < self.retry.first_pause && attempt > 0 {
                return Err(late(failure));
            }
            // Shorter pauses near the end: the last tries may be the ones that succeed.
            let pause = self.retry.pause(attempt, jitter(key, attempt)).min(left / 2);
            let second = Retry::second_try(self.patience(Some(&failure)));
            let end = if attempt == 0 { end.max(Instant::now() + pause + second) } else { end };
            self.tell(action, key, &failure, gained().elapsed() + pause, end);
            last = Some(failure);
            tokio::time::sleep(pause).await;
        }
        Err(late(last.unwrap_or_else(Failure::silent)))
    }

    /// Why a try failed that may be repeated; an error if it may not.
    fn failure(
        &self,
        action: &'static str,
        key: &str,
        attempt: u32,
        error: &object_store::Error,
    ) -> Result<Failure> {
        let failure = Failure::new(error);
        let cause = failure.cause();
        if !cause.is_before_contact() {
            self.met.store(true, Ordering::Relaxed);
        }
        if matches!(error, object_store::Error::NotFound { .. }) && cause != Cause::NoSuchBucket {
            return Err(Error::missing(key));
        }
        if self.is_permanent(error) || attempt + 1 >= self.retry.attempts {
            return Err(Error::Storage { action, key: key.to_owned(), source: failure });
        }
        Ok(failure)
    }

    /// Whether trying again is pointless. Missing credentials are not final once the server has answered: the
    /// service that gives them out may have an outage.
    pub(crate) fn is_permanent(&self, error: &object_store::Error) -> bool {
        let met = self.met.load(Ordering::Relaxed);
        is_permanent(error) && !(met && Cause::of(error) == Cause::NoCredentials)
    }

    /// The same rules for the parts of a multipart upload.
    #[must_use]
    pub fn for_parts(&self) -> Arc<dyn RetryPolicy> {
        Arc::new(Parts(self.retry.clone()))
    }

    /// How long in all a request may be repeated, after this last failure.
    fn patience(&self, last: Option<&Failure>) -> Duration {
        let stranger = !self.met.load(Ordering::Relaxed);
        match last {
            Some(failure) if stranger && failure.cause().is_before_contact() => {
                self.retry.first_contact.min(self.retry.deadline)
            }
            _ => self.retry.deadline,
        }
    }

    /// Reports failures that persist, from time to time. `since` is for how long the request will
    /// have failed at its next try.
    fn tell(&self, action: &str, key: &str, failure: &Failure, since: Duration, end: Instant) {
        tracing::debug!(key, %failure, "could not {action}, trying again");
        if since < WARN_AFTER {
            return;
        }
        let now = Instant::now();
        let mut warned = self.warned.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if warned.is_none_or(|at| now - at >= WARN_AFTER) {
            *warned = Some(now);
            let left = round(end.saturating_duration_since(now));
            tracing::warn!("could not {action} {key}: {failure}; trying again for up to {left:?}");
        }
    }
}

/// Repeats parts of a multipart upload; no other writer touches those parts.
#[derive(Debug)]
struct Parts(Retry);

#[async_trait::async_trait]
impl RetryPolicy for Parts {
    async fn retry(&self, context: RetryContext) -> bool {
        let tries = u32::try_from(context.attempt).unwrap_or(u32::MAX);
        let pause = self
            .0
            .pause(tries.saturating_sub(1), u64::from(tries).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        if !may_pass(context.failure, tries)
            || tries >= self.0.attempts
            || context.elapsed + pause >= self.0.deadline
        {
            return false;
        }
        tokio::time::sleep(pause).await;
        true
    }
}

/// Whether another try may succeed in storing a part that failed.
fn may_pass(failure: RetryFailure, tries: u32) -> bool {
    match failure {
        // The status does not tell whether the body was late or damaged in transit.
        RetryFailure::Status(status) if status.as_u16() == 400 => tries <= 2,
        RetryFailure::Status(status) => !Cause::of_status(status.as_u16(), "").is_permanent(),
        RetryFailure::Transport(kind) => kind != HttpErrorKind::Decode,
        _ => false,
    }
}

fn round(time: Duration) -> Duration {
    match time.as_secs() {
        0 => Duration::from_millis(u64::try_from(time.as_millis()).unwrap_or(0)),
        _ => Duration::from_secs(time.as_secs_f64().round() as u64),
    }
}

fn jitter(key: &str, attempt: u32) -> u64 {
    let mixed = key.bytes().fold(u64::from(attempt) + 1, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    });
    mixed.wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

/// Whether trying again is pointless at the first contact.
pub(crate) fn is_permanent(error: &object_store::Error) -> bool {
    matches!(error, object_store::Error::NotFound { .. }) || Answer::of(error).is_permanent()
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::atomic::AtomicU32;

    use super::*;

    fn failing(kind: io::ErrorKind) -> object_store::Error {
        object_store::Error::Generic { store: "x", source: Box::new(io::Error::from(kind)) }
    }

    /// Makes a request to a server that refuses connections for `length`; returns the number of
    /// tries.
    async fn outage(retrier: &Retrier, length: Duration) -> Result<u32> {
        let start = Instant::now();
        let tries = AtomicU32::new(0);
        let request = || async {
            tries.fetch_add(1, Ordering::Relaxed);
            match start.elapsed() < length {
                true => Err(failing(io::ErrorKind::ConnectionRefused)),
                false => Ok(()),
            }
        };
        retrier.run("write", "k", 0, request).await?;
        Ok(tries.into_inner())
    }

    #[tokio::test(start_paused = true)]
    async fn an_outage_ends_a_request_at_its_deadline_only() {
        let retrier = Retrier::new(Retry::default());
        outage(&retrier, Duration::from_secs(20)).await.unwrap();
        let tries = outage(&retrier, Duration::from_secs(240)).await.unwrap();
        assert!((20..80).contains(&tries), "{tries}");
        let error = outage(&retrier, Duration::from_secs(400)).await.unwrap_err();
        assert!(matches!(error, Error::Deadline { .. }), "{error}");
        assert_eq!(error.cause(), Some(Cause::Refused));
        assert!(error.to_string().contains("start the server"), "{error}");
    }

    #[tokio::test(start_paused = true)]
    async fn an_address_that_never_answered_is_given_up_sooner() {
        let retrier = Retrier::new(Retry::default());
        let start = Instant::now();
        let error = outage(&retrier, Duration::from_secs(3600)).await.unwrap_err();
        assert_eq!(error.cause(), Some(Cause::Refused));
        assert!((20..=30).contains(&start.elapsed().as_secs()), "{:?}", start.elapsed());
        let retrier = Retrier::new(Retry::within(Duration::from_secs(100)));
        outage(&retrier, Duration::from_secs(80)).await.unwrap();
    }

    /// Makes a request whose first try gets no answer; the client reports that after `silence` seconds, if given.
    async fn lost_answer(deadline: u64, bytes: u64, silence: Option<u64>) -> Result<u64> {
        let retrier = Retrier::new(Retry::within(Duration::from_secs(deadline)));
        let (start, tries) = (Instant::now(), AtomicU32::new(0));
        let request = || async {
            if tries.fetch_add(1, Ordering::Relaxed) > 0 {
                return Ok(());
            }
            match silence {
                Some(seconds) => tokio::time::sleep(Duration::from_secs(seconds)).await,
                None => std::future::pending().await,
            }
            Err(failing(io::ErrorKind::TimedOut))
        };
        retrier.run("read", "k", bytes, request).await?;
        assert_eq!(tries.into_inner(), 2);
        Ok(start.elapsed().as_secs())
    }

    #[tokio::test(start_paused = true)]
    async fn one_lost_answer_is_no_failure() {
        assert_eq!(lost_answer(20, 0, None).await.unwrap(), 15);
        // The client notices it at the deadline, or after it: for what is large, or if the machine was suspended.
        assert_eq!(lost_answer(30, 16 << 20, Some(30)).await.unwrap(), 30);
        assert_eq!(lost_answer(30, 16 << 20, Some(200)).await.unwrap(), 200);
    }

    /// A place that drops packets: the client notices it after `silence`, each time.
    #[tokio::test(start_paused = true)]
    async fn a_silent_address_that_never_answered_is_given_up_sooner_too() {
        for (silence, most) in [(20, 30), (30, 38)] {
            let retrier = Retrier::new(Retry::default());
            let start = Instant::now();
            let request = || async {
                tokio::time::sleep(Duration::from_secs(silence)).await;
                Err::<(), _>(failing(io::ErrorKind::TimedOut))
            };
            let error = retrier.run("read", "k", 0, request).await.unwrap_err();
            assert_eq!(error.cause(), Some(Cause::Timeout));
            assert!(start.elapsed() <= Duration::from_secs(most), "{:?}", start.elapsed());
        }
    }

    #[tokio::test(start_paused = true)]
    async fn one_attempt_is_one_try_with_all_the_time() {
        let retry = Retry { attempts: 1, ..Retry::within(Duration::from_secs(20)) };
        for silence in [19, 21] {
            let (retrier, tries) = (Retrier::new(retry.clone()), AtomicU32::new(0));
            let start = Instant::now();
            let request = || async {
                tries.fetch_add(1, Ordering::Relaxed);
                tokio::time::sleep(Duration::from_secs(silence)).await;
                Ok(())
            };
            let done = retrier.run("read", "k", 0, request).await;
            assert_eq!(done.is_ok(), silence < 20, "{done:?}");
            assert_eq!(
                (tries.load(Ordering::Relaxed), start.elapsed().as_secs()),
                (1, silence.min(20))
            );
        }
    }

    #[tokio::test(start_paused = true)]
    async fn silence_ends_at_the_deadline_and_later_for_what_is_large() {
        for (bytes, most) in [(0, 5), (64 << 20, 5 + 1024)] {
            let retrier = Retrier::new(Retry::within(Duration::from_secs(5)));
            let start = Instant::now();
            let silent = || std::future::pending::<object_store::Result<()>>();
            let error = retrier.run("read", "k", bytes, silent).await.unwrap_err();
            assert_eq!(error.cause(), Some(Cause::Timeout));
            assert_eq!(start.elapsed().as_secs(), most);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_listing_may_take_as_long_as_it_goes_on() {
        // Each page comes after three seconds; the deadline is five.
        for (pages, stuck, ok) in [(100, false, true), (100, true, false)] {
            let retrier = Retrier::new(Retry::within(Duration::from_secs(5)));
            let (progress, start) = (Progress::default(), Instant::now());
            let list = || async {
                for _ in 0..pages {
                    tokio::time::sleep(Duration::from_secs(3)).await;
                    progress.made();
                }
                match stuck {
                    true => std::future::pending().await,
                    false => Ok(pages),
                }
            };
            let done = retrier.run_while_moving("list", "k", 0, &progress, list).await;
            assert_eq!(done.is_ok(), ok, "{done:?}");
            let most = 3 * pages + if ok { 0 } else { 5 };
            assert_eq!(start.elapsed().as_secs(), most);
        }
        // It is tried again where it failed late, too, but not forever at the same place.
        for (fail, ok) in [(1, true), (u32::MAX, false)] {
            let retrier = Retrier::new(Retry::within(Duration::from_secs(5)));
            let (progress, tries) = (Progress::default(), AtomicU32::new(0));
            let list = || async {
                let number = tries.fetch_add(1, Ordering::Relaxed);
                for _ in 0..10 {
                    tokio::time::sleep(Duration::from_secs(3)).await;
                    progress.made();
                }
                let reset = io::Error::from(io::ErrorKind::ConnectionReset);
                let failed = object_store::Error::Generic { store: "test", source: reset.into() };
                if number < fail { Err(failed) } else { Ok(()) }
            };
            let done = retrier.run_while_moving("list", "k", 0, &progress, list).await;
            assert_eq!((done.is_ok(), tries.load(Ordering::Relaxed)), (ok, 2), "{done:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn what_will_not_pass_is_tried_once() {
        for kind in [io::ErrorKind::StorageFull, io::ErrorKind::PermissionDenied] {
            let retrier = Retrier::new(Retry::default());
            let tries = AtomicU32::new(0);
            let request = || async {
                tries.fetch_add(1, Ordering::Relaxed);
                object_store::Result::<()>::Err(failing(kind))
            };
            let error = retrier.run("write", "k", 0, request).await.unwrap_err();
            assert!(matches!(error, Error::Storage { .. }), "{error}");
            assert_eq!(tries.into_inner(), 1);
        }
    }

    /// What the client says if a machine's metadata service does not answer.
    fn no_credentials() -> object_store::Error {
        let said = "Error performing PUT http://169.254.169.254/latest/api/token";
        let source = io::Error::new(io::ErrorKind::TimedOut, said);
        let source = object_store::client::HttpError::new(HttpErrorKind::Timeout, source);
        object_store::Error::Generic { store: "S3", source: Box::new(source) }
    }

    #[tokio::test(start_paused = true)]
    async fn credentials_that_were_there_before_are_waited_for() {
        let retrier = Retrier::new(Retry::default());
        let tries = AtomicU32::new(0);
        let request = || async {
            match tries.fetch_add(1, Ordering::Relaxed) {
                0..10 => Err(no_credentials()),
                _ => Ok(()),
            }
        };
        // The first failure is no contact.
        for tried in 1..=2 {
            let error = retrier.run("write", "k", 0, request).await.unwrap_err();
            assert_eq!(error.cause(), Some(Cause::NoCredentials));
            assert_eq!(tries.load(Ordering::Relaxed), tried);
        }
        outage(&retrier, Duration::ZERO).await.unwrap();
        retrier.run("write", "k", 0, request).await.unwrap();
        assert!(!retrier.is_permanent(&no_credentials()));
        assert!(retrier.is_permanent(&failing(io::ErrorKind::PermissionDenied)));
    }

    #[test]
    fn a_part_is_repeated_after_what_may_have_been_its_way() {
        let status = |code| RetryFailure::Status(http::StatusCode::from_u16(code).unwrap());
        let passes = may_pass;
        assert!(passes(status(400), 1) && passes(status(400), 2) && !passes(status(400), 3));
        assert!(passes(status(503), 30) && !passes(status(403), 1));
        assert!(passes(RetryFailure::Transport(HttpErrorKind::Timeout), 30));
        assert!(!passes(RetryFailure::Transport(HttpErrorKind::Decode), 1));
    }
}
