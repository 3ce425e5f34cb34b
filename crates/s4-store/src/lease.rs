//! The lease of a store that allows one writer at a time.
//!
//! It needs only PUT, LIST and DELETE of an object store, with immediately visible effects. A process that
//! wants to write puts a claim, and then lists: if nothing else is there it becomes the holder, otherwise it
//! withdraws. If two do so at the same time, at least one sees the other: both may withdraw, but they never both
//! hold the lease. A lease not renewed for [`EXPIRES`], by the object store's own clock or while a process watched
//! it, is dead, and the next holder removes it. A holder checks for its lease before each commit; if it renewed too
//! late, it claims the lease again.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use chrono::{DateTime, TimeDelta, Utc};
use object_store::path::Path;
use tokio::sync::Mutex;
use tokio::time::Instant;
use uuid::Uuid;

use crate::error::{Error, Result};
use crate::holder::Holder;
use crate::io::Io;
use crate::layout::Layout;

/// A lease that was not renewed for this long is dead.
const EXPIRES: Duration = Duration::from_secs(60);
/// A holder relies on its lease for this long after it began the last renewal.
const RELIES: Duration = Duration::from_secs(45);
/// How often a lease is renewed.
const RENEWS: Duration = Duration::from_secs(15);
/// How often a process that waits for the lease checks it.
const LOOKS: Duration = Duration::from_secs(2);
/// About how long two processes that claim at the same time wait for each other.
const YIELDS: Duration = Duration::from_millis(100);
/// After this many stale listings in a row, the store is refused.
const STALE: u32 = 6;
/// The most bytes of a lease.
const MAX_LEASE: u64 = 4 << 10;

/// A point in time by two clocks: a steady one, which stops while the machine sleeps, and the wall clock, which may
/// be set.
#[derive(Debug, Clone, Copy)]
struct Stamp(Instant, SystemTime);

impl Stamp {
    fn now() -> Self {
        Self(Instant::now(), SystemTime::now())
    }

    fn age(self) -> Duration {
        self.0.elapsed().max(self.1.elapsed().unwrap_or_default())
    }
}

/// This process's side of the lease of one store.
#[derive(Debug)]
pub(crate) struct Lease {
    io: Io,
    layout: Layout,
    place: String,
    me: Uuid,
    /// The time of the last renewal, if the lease is held.
    held: Mutex<Option<Stamp>>,
    /// When the lease was taken or is being claimed, in milliseconds since 1970.
    since_ms: AtomicI64,
    renewing: AtomicBool,
    /// Number of keys used so far. A deleted key is never written again, since its deletion may take effect late.
    keys: AtomicU64,
    /// The number of the key of the lease that is held.
    held_key: AtomicU64,
}

/// The leases and claims of other processes, as a listing shows them.
#[derive(Default)]
struct Seen {
    /// Leases that are alive, and when each was last renewed.
    held: Vec<(Path, DateTime<Utc>)>,
    claims: Vec<(Path, DateTime<Utc>)>,
    dead: Vec<Path>,
}

impl Seen {
    fn is_free(&self) -> bool {
        self.held.is_empty() && self.claims.is_empty()
    }
}

/// Leases and claims of others, as seen while waiting: for each, its date, and since when it has had that date. If
/// the store's clock was set back after a renewal, the date lies in the future and does not tell whether the lease
/// is dead.
#[derive(Default)]
struct Watched(BTreeMap<Path, (DateTime<Utc>, Instant)>);

impl Watched {
    /// Records what was seen. Returns the leases and claims that have not been renewed for [`EXPIRES`].
    fn note(&mut self, seen: &Seen) -> Vec<Path> {
        let there: Vec<_> = seen.held.iter().chain(&seen.claims).collect();
        self.0.retain(|key, _| there.iter().any(|(there, _)| there == key));
        let mut dead = Vec::new();
        for (key, date) in there {
            let now = Instant::now();
            let watched = self.0.entry(key.clone()).or_insert((*date, now));
            if watched.0 != *date {
                *watched = (*date, now);
            } else if watched.1.elapsed() > EXPIRES {
                dead.push(key.clone());
            }
        }
        dead
    }
}

impl Lease {
    pub(crate) fn new(io: Io, layout: Layout, place: &str, me: Uuid) -> Arc<Self> {
        let (held, since_ms) = (Mutex::default(), AtomicI64::new(0));
        let (place, renewing) = (place.to_owned(), AtomicBool::new(false));
        let (keys, held_key) = (AtomicU64::new(0), AtomicU64::new(0));
        Arc::new(Self { io, layout, place, me, held, since_ms, renewing, keys, held_key })
    }

    /// Takes the lease, unless it is held. Returns whether it was taken just now. Waits for a holder
    /// that may be dead.
    pub(crate) async fn take(self: &Arc<Self>) -> Result<bool> {
        let mut held = self.held.lock().await;
        if held.is_some() {
            return Ok(false);
        }
        *held = Some(self.acquire().await?);
        if !self.renewing.swap(true, Ordering::SeqCst) {
            tokio::spawn(renew(Arc::downgrade(self)));
        }
        Ok(true)
    }

    /// Makes sure that this process holds the lease. Returns until when it may rely on that.
    pub(crate) async fn confirm(&self) -> Result<Instant> {
        let mut held = self.held.lock().await;
        let renewed = match *held {
            Some(renewed) => self.keep(renewed).await,
            None => Err(self.lost().await),
        };
        match renewed {
            Ok(renewed) => {
                *held = Some(renewed);
                Ok(renewed.0
                    + RELIES.saturating_sub(renewed.age().saturating_sub(renewed.0.elapsed())))
            }
            Err(e) => {
                if matches!(e, Error::LeaseLost { .. }) {
                    *held = None;
                }
                Err(e)
            }
        }
    }

    /// Whether this process had the lease when it last looked.
    pub(crate) async fn is_held(&self) -> bool {
        self.held.lock().await.is_some()
    }

    /// Deletes this process's lease.
    pub(crate) async fn release(&self) -> Result<()> {
        match self.held.lock().await.take() {
            Some(_) => self.io.delete(&self.held_key()).await,
            None => Ok(()),
        }
    }

    /// Removes the leases of others, dead or not, and names them.
    pub(crate) async fn remove_others(&self) -> Result<Vec<Holder>> {
        let mut removed = Vec::new();
        for meta in self.io.list(&self.layout.leases(), None).await? {
            if self.is_own(&meta.location) {
                continue;
            }
            let holder = self.holder(&meta.location).await;
            self.io.delete(&meta.location).await?;
            removed.push(holder);
        }
        Ok(removed)
    }

    async fn acquire(&self) -> Result<Stamp> {
        let mut claim = self.new_key(CLAIM);
        let taken = self.contend(&mut claim).await;
        if taken.is_err() {
            // The claim would expire, but nobody needs to wait for that.
            let _ = self.io.delete(&claim).await;
        }
        taken
    }

    async fn contend(&self, claim: &mut Path) -> Result<Stamp> {
        let start = Instant::now();
        let mut first: Option<(Path, DateTime<Utc>, Instant)> = None;
        let mut watched = Watched::default();
        loop {
            let stamp = Stamp::now();
            self.since_ms.store(Utc::now().timestamp_millis(), Ordering::SeqCst);
            self.io.put(claim, self.body()?).await?;
            let mut seen = self.look(claim).await?;
            if stamp.age() >= RELIES {
                // The machine slept: what looked dead may have been renewed, and the claim may be gone.
                self.withdraw(claim).await?;
                let other = seen.held.pop().or_else(|| seen.claims.pop());
                if let Some((key, _)) = other.filter(|_| start.elapsed() > EXPIRES + RENEWS) {
                    return Err(self.locked(&key, false).await);
                }
                continue;
            }
            if seen.is_free() && !seen.dead.is_empty() {
                for key in &seen.dead {
                    self.io.delete(key).await?;
                }
                // A lease that looked dead may have been renewed at the last moment.
                seen = self.look(claim).await?;
            }
            let dead = watched.note(&seen);
            if !dead.is_empty() {
                for key in &dead {
                    self.io.delete(key).await?;
                }
                // As above, and others may have come meanwhile.
                continue;
            }
            if seen.is_free() {
                let number = self.keys.fetch_add(1, Ordering::SeqCst);
                self.held_key.store(number, Ordering::SeqCst);
                self.io.put(&self.held_key(), self.body()?).await?;
                self.withdraw(claim).await?;
                // If the machine slept in between, the claim may have been dead by now.
                if stamp.age() < RELIES {
                    return Ok(stamp);
                }
                self.io.delete(&self.held_key()).await?;
                continue;
            }
            let pause = match seen.held.pop() {
                Some((key, renewed)) => {
                    self.withdraw(claim).await?;
                    let alive = match &mut first {
                        // A write that its holder began before it died may arrive late, but not as late as this.
                        // A holder that gave the lease back may have taken it again, under another key.
                        Some((k, at, since))
                            if process_of(k) == process_of(&key)
                                && (&*k, &*at) != (&key, &renewed) =>
                        {
                            (*k, *at) = (key.clone(), renewed);
                            since.elapsed() >= RENEWS / 2
                        }
                        _ => false,
                    };
                    if alive || start.elapsed() > EXPIRES + RENEWS {
                        return Err(self.locked(&key, alive).await);
                    }
                    if first.is_none() {
                        self.tell_waiting(&key).await;
                    }
                    if first.as_ref().is_none_or(|(k, ..)| *k != key) {
                        first = Some((key, renewed, Instant::now()));
                    }
                    LOOKS
                }
                None => {
                    // The claim with the lowest name stays, and waits until the others have
                    // withdrawn.
                    if seen.claims.iter().any(|(other, _)| other < &*claim) {
                        self.withdraw(claim).await?;
                    }
                    if start.elapsed() > EXPIRES + RENEWS {
                        let other = seen.claims.pop().map_or_else(|| claim.clone(), |(key, _)| key);
                        return Err(self.locked(&other, false).await);
                    }
                    YIELDS + YIELDS.mul_f64(f64::from(self.me.as_bytes()[15]) / 128.0)
                }
            };
            tokio::time::sleep(pause).await;
        }
    }

    /// Checks that the lease is still there, and renews it if that is due.
    async fn keep(&self, renewed: Stamp) -> Result<Stamp> {
        let key = self.held_key();
        let listed = self.io.list(&self.layout.leases(), None).await?;
        // A listing may be stale.
        if !listed.iter().any(|m| m.location == key) {
            match self.io.head(&key).await {
                Ok(_) => {}
                Err(e) if e.is_missing() => return Err(self.lost().await),
                Err(e) => return Err(e),
            }
        }
        if renewed.age() < RENEWS / 2 {
            return Ok(renewed);
        }
        let stamp = Stamp::now();
        self.io.put(&key, self.body()?).await?;
        // Nobody takes a lease that is not dead. If ours may have been dead, other holders and
        // claims decide.
        if renewed.age() < RELIES {
            return Ok(stamp);
        }
        if self.look(&key).await?.is_free() {
            return Ok(stamp);
        }
        self.io.delete(&key).await?;
        Err(self.lost().await)
    }

    /// Lists the leases. `own` was just written, so its date counts as the present for the age of
    /// the others.
    async fn look(&self, own: &Path) -> Result<Seen> {
        for attempt in 0..STALE {
            let listed = self.io.list(&self.layout.leases(), None).await?;
            let Some(now) = listed.iter().find(|m| m.location == *own).map(|m| m.last_modified)
            else {
                tokio::time::sleep(YIELDS * attempt).await;
                continue;
            };
            let mut seen = Seen::default();
            let expires = TimeDelta::from_std(EXPIRES).unwrap_or_default();
            for meta in listed {
                if self.is_own(&meta.location) {
                    continue;
                }
                let name = meta.location.filename().unwrap_or_default();
                if now.signed_duration_since(meta.last_modified) >= expires {
                    seen.dead.push(meta.location);
                } else if name.starts_with(CLAIM) {
                    seen.claims.push((meta.location, meta.last_modified));
                } else {
                    seen.held.push((meta.location, meta.last_modified));
                }
            }
            return Ok(seen);
        }
        Err(Error::Refused(format!(
            "{}: listings do not show recent writes, so that two writers could miss each other",
            self.place
        )))
    }

    /// Deletes a claim. The next one has a key of its own.
    async fn withdraw(&self, claim: &mut Path) -> Result<()> {
        self.io.delete(claim).await?;
        *claim = self.new_key(CLAIM);
        Ok(())
    }

    fn new_key(&self, kind: &str) -> Path {
        self.key(kind, self.keys.fetch_add(1, Ordering::SeqCst))
    }

    /// The key of the lease that is held.
    fn held_key(&self) -> Path {
        self.key(HELD, self.held_key.load(Ordering::SeqCst))
    }

    fn key(&self, kind: &str, number: u64) -> Path {
        self.layout.leases().join(format!("{kind}{}-{number}", self.me.as_hyphenated()))
    }

    fn is_own(&self, key: &Path) -> bool {
        let name = key.filename().unwrap_or_default();
        name.contains(&self.me.as_hyphenated().to_string())
    }

    fn body(&self) -> Result<Bytes> {
        let json = serde_json::to_vec(&Holder::this_process(self.since_ms.load(Ordering::SeqCst)));
        json.map(Bytes::from).map_err(|e| Error::Argument(e.to_string()))
    }

    /// Who wrote a lease, as far as that can be read.
    async fn holder(&self, key: &Path) -> Holder {
        let read = self.io.get(key, MAX_LEASE).await.ok();
        let holder = read.and_then(|bytes| serde_json::from_slice(&bytes).ok());
        holder.unwrap_or(Holder { host: "an unknown host".into(), pid: 0, since_ms: i64::MAX })
    }

    async fn locked(&self, key: &Path, renewed: bool) -> Error {
        let holder = Box::new(self.holder(key).await);
        Error::Locked { place: self.place.clone(), holder, renewed }
    }

    async fn lost(&self) -> Error {
        let listed = self.io.list(&self.layout.leases(), None).await.unwrap_or_default();
        let other = listed.into_iter().map(|m| m.location);
        let other = other.filter(|key| !self.is_own(key) && is_held(key)).max();
        let holder = match other {
            Some(key) => Some(Box::new(self.holder(&key).await)),
            None => None,
        };
        Error::LeaseLost { place: self.place.clone(), holder }
    }

    async fn tell_waiting(&self, key: &Path) {
        let holder = self.holder(key).await;
        tracing::warn!(
            place = %self.place,
            "this store allows one writer at a time and is in use by {holder}: waiting up to {EXPIRES:?} for it \
             to end or to renew its lease"
        );
    }
}

/// Prefixes of names: of the claim of a process that wants the lease, and of the lease of its
/// holder.
const CLAIM: &str = "claim-";
const HELD: &str = "held-";

/// The UUID of the process in the name of its lease.
fn process_of(held: &Path) -> Option<&str> {
    held.filename()?.strip_prefix(HELD)?.get(..36)
}

fn is_held(key: &Path) -> bool {
    key.filename().is_some_and(|name| name.starts_with(HELD))
}

/// Renews a lease until it is given back, lost, or its store is closed.
async fn renew(lease: std::sync::Weak<Lease>) {
    loop {
        tokio::time::sleep(RENEWS).await;
        let Some(lease) = lease.upgrade() else { return };
        let mut held = lease.held.lock().await;
        let Some(renewed) = *held else {
            lease.renewing.store(false, Ordering::SeqCst);
            return;
        };
        match tokio::time::timeout(RENEWS, lease.keep(renewed)).await {
            Ok(Ok(renewed)) => *held = Some(renewed),
            Ok(Err(e @ Error::LeaseLost { .. })) => {
                tracing::error!(error = %e, "lost the lease of the store");
                *held = None;
                lease.renewing.store(false, Ordering::SeqCst);
                return;
            }
            Ok(Err(e)) => tracing::warn!(error = %e, "could not renew the lease of the store"),
            Err(_) => tracing::warn!("could not renew the lease of the store in time"),
        }
    }
}
