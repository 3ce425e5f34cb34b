//! An object store that fails on command, above the retries of a client.

use std::collections::HashMap;
use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use chrono::{DateTime, TimeDelta, Utc};
use futures::stream::BoxStream;
use futures::{StreamExt, TryStreamExt};
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, GetOptions, GetResult, GetResultPayload, ListResult, MultipartUpload,
    ObjectMeta, ObjectStore, ObjectStoreExt, PutMode, PutMultipartOptions, PutOptions, PutPayload,
    PutResult, Result,
};
use tokio::time::Instant;

use super::Random;

/// A fault of one request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// It fails and has no effect.
    Before,
    /// It has its effect and the answer is lost.
    After,
    /// A create has its effect, a gateway answers 503, and the client's own repetition loses against
    /// it: `AlreadyExists`, though the object is ours.
    TakenByUs,
    /// A create is answered with 409 and has no effect: `AlreadyExists`, though nothing is there.
    Conflict,
    /// A read ends half way.
    Short,
    /// A read has one bit flipped.
    Flipped,
    /// A listing misses what was written last.
    Stale,
    /// A write or deletion fails, and has its effect later: [`FaultStore::set_lateness`].
    Late,
    /// The process dies before the request: this and all that follow fail.
    Crash,
    /// The process dies after the request.
    CrashAfter,
    /// It is refused permanently and has no effect.
    Denied,
    /// A write fails for lack of space and has no effect.
    Full,
    /// A read fails as that of a bad sector does.
    Unreadable,
    /// It has its effect, and no answer ever comes.
    Unanswered,
}

impl Fault {
    /// All that a server may have.
    pub const ALL: [Self; 11] = [
        Self::Before,
        Self::After,
        Self::TakenByUs,
        Self::Conflict,
        Self::Short,
        Self::Flipped,
        Self::Stale,
        Self::Late,
        Self::Crash,
        Self::CrashAfter,
        Self::Denied,
    ];
}

/// The kind of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OpKind {
    /// A write that replaces.
    Put,
    /// A write that must not replace.
    Create,
    /// A read.
    Get,
    /// A look-up.
    Head,
    /// A listing.
    List,
    /// A deletion.
    Delete,
}

/// A request, as a plan sees it.
#[derive(Debug, Clone)]
pub struct OpInfo {
    /// Its number, from 0.
    pub number: u64,
    /// Its kind.
    pub kind: OpKind,
    /// The key or prefix.
    pub key: String,
}

type Plan = Box<dyn FnMut(&OpInfo) -> Option<Fault> + Send>;

/// Number of the last written objects that a stale listing misses.
const STALE: usize = 4;

#[derive(Default)]
struct Inside {
    plan: Option<Plan>,
    ops: u64,
    fired: u64,
    dead: bool,
    /// Keys in the order in which they were last written, for stale listings.
    written: Vec<Path>,
    /// When each object was written, by the clock of the runtime.
    times: HashMap<Path, DateTime<Utc>>,
    delays: Option<Random>,
    lateness: Option<(Random, Duration)>,
    skew: Option<(Random, Duration)>,
    outlive: bool,
}

/// How late the effect of a request is unless a test says otherwise.
const LATE: Duration = Duration::from_secs(1);

struct Shared {
    inner: Arc<dyn ObjectStore>,
    inside: Mutex<Inside>,
    /// Set if `last_modified` follows the clock of the runtime, which a test can set.
    start: Option<Instant>,
}

/// An object store around another one that fails on command, counts requests, and can be slow.
#[derive(Clone)]
pub struct FaultStore {
    shared: Arc<Shared>,
}

impl FaultStore {
    /// A store that behaves as `inner` until it is given faults.
    #[must_use]
    pub fn new(inner: Arc<dyn ObjectStore>) -> Self {
        Self { shared: Arc::new(Shared { inner, inside: Mutex::default(), start: None }) }
    }

    /// As [`FaultStore::new`]; the times of objects follow the clock of the runtime, so that a test
    /// that pauses it can let days pass.
    #[must_use]
    pub fn with_runtime_clock(inner: Arc<dyn ObjectStore>) -> Self {
        let start = Some(Instant::now());
        Self { shared: Arc::new(Shared { inner, inside: Mutex::default(), start }) }
    }

    /// From now on `plan` decides what goes wrong. Numbers start at 0 again.
    pub fn set_plan(&self, plan: impl FnMut(&OpInfo) -> Option<Fault> + Send + 'static) {
        let mut inside = self.inside();
        inside.plan = Some(Box::new(plan));
        inside.ops = 0;
        inside.fired = 0;
        inside.dead = false;
    }

    /// From now on only the request with this number goes wrong.
    pub fn fail_nth(&self, nth: u64, fault: Fault) {
        self.set_plan(move |op| (op.number == nth).then_some(fault));
    }

    /// From now on nothing goes wrong, and a dead process lives again. Numbers start at 0 again.
    pub fn heal(&self) {
        self.set_plan(|_| None);
        self.inside().delays = None;
    }

    /// From now on each request takes a pseudo-random time of up to 20 ms.
    pub fn set_delays(&self, seed: u64) {
        self.inside().delays = Some(Random::new(seed));
    }

    /// From now on a late effect comes after a pseudo-random time of up to `longest`; one second
    /// until then.
    pub fn set_lateness(&self, seed: u64, longest: Duration) {
        self.inside().lateness = Some((Random::new(seed), longest));
    }

    /// From now on the dates of written objects are off by up to `most`, as those of several servers
    /// with clocks of their own.
    pub fn set_skew(&self, seed: u64, most: Duration) {
        self.inside().skew = Some((Random::new(seed), most));
    }

    /// From now on a write or deletion that was begun ends even if its caller, for example a process
    /// that dies, does not wait for it.
    pub fn outlive_callers(&self) {
        self.inside().outlive = true;
    }

    /// Gives an object another date, until it is written again.
    pub fn set_date(&self, key: &Path, date: DateTime<Utc>) {
        self.inside().times.insert(key.clone(), date);
    }

    /// Requests since the plan was set.
    #[must_use]
    pub fn ops(&self) -> u64 {
        self.inside().ops
    }

    /// Faults that had an effect since the plan was set: not every fault fits every request.
    #[must_use]
    pub fn fired(&self) -> u64 {
        self.inside().fired
    }

    fn inside(&self) -> MutexGuard<'_, Inside> {
        self.shared.inside.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    async fn delay(&self) {
        let pause = self.inside().delays.as_mut().map(|random| random.below(20));
        if let Some(ms) = pause {
            tokio::time::sleep(Duration::from_millis(ms)).await;
        }
    }

    /// Counts a request and says what goes wrong with it, if that fits its kind.
    async fn begin(&self, kind: OpKind, key: &Path) -> Result<Option<Fault>> {
        self.delay().await;
        let fault = {
            let mut inside = self.inside();
            let op = OpInfo { number: inside.ops, kind, key: key.to_string() };
            inside.ops += 1;
            if inside.dead {
                return Err(injected("the process is dead"));
            }
            let fault = inside.plan.as_mut().and_then(|plan| plan(&op)).filter(|f| fits(*f, kind));
            inside.fired += u64::from(fault.is_some());
            inside.dead = fault == Some(Fault::Crash);
            fault
        };
        match fault {
            Some(Fault::Unanswered) if !is_change(kind) => std::future::pending().await,
            Some(Fault::Unreadable) => {
                let source = Box::new(std::io::Error::from_raw_os_error(5));
                Err(Error::Generic { store: "fault", source })
            }
            Some(Fault::Full) => {
                let source = Box::new(std::io::Error::from(std::io::ErrorKind::StorageFull));
                Err(Error::Generic { store: "fault", source })
            }
            Some(Fault::Before) => Err(injected("not done")),
            Some(Fault::Conflict) => Err(taken(key)),
            Some(Fault::Denied) => Err(Error::PermissionDenied {
                path: key.to_string(),
                source: "injected: 403".into(),
            }),
            Some(Fault::Crash) => Err(injected("the process died before the request")),
            other => Ok(other),
        }
    }

    /// Turns the answer of a request that was carried out into what the caller sees.
    async fn end<T>(&self, fault: Option<Fault>, key: &Path, answer: Result<T>) -> Result<T> {
        self.delay().await;
        match fault {
            Some(Fault::After) => Err(injected("done, the answer is lost")),
            Some(Fault::Unanswered) => std::future::pending().await,
            Some(Fault::TakenByUs) => answer.and(Err(taken(key))),
            Some(Fault::CrashAfter) => {
                self.inside().dead = true;
                Err(injected("the process died after the request"))
            }
            _ => answer,
        }
    }

    /// Carries out a request, or lets it be carried out later.
    async fn effect<T: Send + 'static>(
        &self,
        fault: Option<Fault>,
        request: impl Future<Output = Result<T>> + Send + 'static,
    ) -> Result<T> {
        if fault != Some(Fault::Late) {
            return request.await;
        }
        let lateness = self.inside().lateness.as_mut().map(|(random, longest)| {
            // Most are not very late.
            let most = longest.as_millis() as u64 >> (random.below(4) * 6);
            Duration::from_millis(random.below(most.max(1)))
        });
        tokio::spawn(async move {
            tokio::time::sleep(lateness.unwrap_or(LATE)).await;
            drop(request.await);
        });
        Err(injected("not done yet"))
    }

    /// Makes a request, which may not depend on the caller's life.
    async fn outlive<T: Send + 'static>(
        &self,
        request: impl Future<Output = Result<T>> + Send + 'static,
    ) -> Result<T> {
        if !self.inside().outlive {
            return request.await;
        }
        tokio::spawn(request).await.unwrap_or_else(|_| Err(injected("the request panicked")))
    }

    async fn put_now(self, key: Path, payload: PutPayload, opts: PutOptions) -> Result<PutResult> {
        let kind = if opts.mode == PutMode::Create { OpKind::Create } else { OpKind::Put };
        let fault = self.begin(kind, &key).await?;
        let (this, to) = (self.clone(), key.clone());
        let put = async move {
            let answer = this.shared.inner.put_opts(&to, payload, opts).await;
            if answer.is_ok() {
                this.note_written(&to);
            }
            answer
        };
        let answer = self.effect(fault, put).await;
        self.end(fault, &key, answer).await
    }

    async fn delete_now(self, key: Path) -> Result<Path> {
        let fault = self.begin(OpKind::Delete, &key).await?;
        let (this, from) = (self.clone(), key.clone());
        let delete = async move {
            let answer = this.shared.inner.delete(&from).await;
            this.inside().times.remove(&from);
            answer
        };
        let answer = self.effect(fault, delete).await;
        self.end(fault, &key, answer).await.map(|()| key)
    }

    fn note_written(&self, key: &Path) {
        let now = self.now();
        let mut inside = self.inside();
        let now = match &mut inside.skew {
            Some((random, most)) => now.map(|now| {
                let most = most.as_millis() as u64;
                let off = TimeDelta::milliseconds(random.below(2 * most) as i64);
                now + off - TimeDelta::milliseconds(most as i64)
            }),
            None => now,
        };
        inside.written.retain(|k| k != key);
        inside.written.push(key.clone());
        if let Some(now) = now {
            inside.times.insert(key.clone(), now);
        }
    }

    fn now(&self) -> Option<DateTime<Utc>> {
        let elapsed = self.shared.start?.elapsed();
        Some(DateTime::<Utc>::UNIX_EPOCH + TimeDelta::from_std(elapsed).unwrap_or_default())
    }

    fn dated(&self, mut meta: ObjectMeta) -> ObjectMeta {
        if let Some(time) = self.inside().times.get(&meta.location) {
            meta.last_modified = *time;
        }
        meta
    }

    fn listing(
        &self,
        prefix: Option<Path>,
        offset: Option<Path>,
    ) -> BoxStream<'static, Result<ObjectMeta>> {
        let this = self.clone();
        let listed = async move {
            let key = prefix.clone().unwrap_or_default();
            let fault = this.begin(OpKind::List, &key).await?;
            let inner = &this.shared.inner;
            let listing = match &offset {
                Some(offset) => inner.list_with_offset(prefix.as_ref(), offset),
                None => inner.list(prefix.as_ref()),
            };
            let mut metas: Vec<_> = listing.try_collect().await?;
            if fault == Some(Fault::Stale) {
                let inside = this.inside();
                let fresh = inside.written.iter().rev().take(STALE).cloned().collect::<Vec<_>>();
                metas.retain(|m| !fresh.contains(&m.location));
            }
            let metas = metas.into_iter().map(|m| Ok(this.dated(m)));
            Ok::<_, Error>(futures::stream::iter(metas.collect::<Vec<Result<_>>>()))
        };
        futures::stream::once(listed).try_flatten().boxed()
    }
}

fn fits(fault: Fault, kind: OpKind) -> bool {
    match fault {
        Fault::Before | Fault::Crash | Fault::Denied | Fault::Unanswered => true,
        Fault::After | Fault::CrashAfter | Fault::Late => is_change(kind),
        Fault::TakenByUs | Fault::Conflict => kind == OpKind::Create,
        Fault::Full => matches!(kind, OpKind::Put | OpKind::Create),
        Fault::Short | Fault::Flipped => kind == OpKind::Get,
        Fault::Unreadable => matches!(kind, OpKind::Get | OpKind::Head),
        Fault::Stale => kind == OpKind::List,
    }
}

fn is_change(kind: OpKind) -> bool {
    matches!(kind, OpKind::Put | OpKind::Create | OpKind::Delete)
}

fn injected(what: &'static str) -> Error {
    Error::Generic { store: "fault", source: format!("injected: {what}").into() }
}

fn taken(key: &Path) -> Error {
    Error::AlreadyExists { path: key.to_string(), source: "injected: 412 or 409".into() }
}

impl fmt::Display for FaultStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FaultStore({})", self.shared.inner)
    }
}

impl fmt::Debug for FaultStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

#[async_trait]
impl ObjectStore for FaultStore {
    async fn put_opts(
        &self,
        key: &Path,
        payload: PutPayload,
        opts: PutOptions,
    ) -> Result<PutResult> {
        self.outlive(self.clone().put_now(key.clone(), payload, opts)).await
    }

    async fn put_multipart_opts(
        &self,
        key: &Path,
        opts: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        self.shared.inner.put_multipart_opts(key, opts).await
    }

    async fn get_opts(&self, key: &Path, options: GetOptions) -> Result<GetResult> {
        let kind = if options.head { OpKind::Head } else { OpKind::Get };
        let fault = self.begin(kind, key).await?;
        let mut result = self.shared.inner.get_opts(key, options).await?;
        self.delay().await;
        result.meta = self.dated(result.meta);
        if !matches!(fault, Some(Fault::Short | Fault::Flipped)) {
            return Ok(result);
        }
        let (meta, range) = (result.meta.clone(), result.range.clone());
        let (attributes, extensions) = (result.attributes.clone(), result.extensions.clone());
        let bytes = damage(result.bytes().await?, fault);
        let payload = GetResultPayload::Stream(futures::stream::once(async { Ok(bytes) }).boxed());
        Ok(GetResult { payload, meta, range, attributes, extensions })
    }

    async fn get_ranges(&self, key: &Path, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
        self.begin(OpKind::Get, key).await?;
        self.shared.inner.get_ranges(key, ranges).await
    }

    fn delete_stream(
        &self,
        keys: BoxStream<'static, Result<Path>>,
    ) -> BoxStream<'static, Result<Path>> {
        let this = self.clone();
        keys.then(move |key| {
            let this = this.clone();
            async move { this.outlive(this.clone().delete_now(key?)).await }
        })
        .boxed()
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.listing(prefix.cloned(), None)
    }

    fn list_with_offset(
        &self,
        prefix: Option<&Path>,
        offset: &Path,
    ) -> BoxStream<'static, Result<ObjectMeta>> {
        self.listing(prefix.cloned(), Some(offset.clone()))
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        let key = prefix.cloned().unwrap_or_default();
        let fault = self.begin(OpKind::List, &key).await?;
        let mut listed = self.shared.inner.list_with_delimiter(prefix).await?;
        if fault == Some(Fault::Stale) {
            let inside = self.inside();
            let fresh: Vec<_> = inside.written.iter().rev().take(STALE).collect();
            listed.objects.retain(|m| !fresh.contains(&&m.location));
            listed.common_prefixes.retain(|p| !fresh.iter().any(|key| key.prefix_matches(p)));
        }
        Ok(listed)
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.shared.inner.copy_opts(from, to, options).await
    }
}

fn damage(bytes: Bytes, fault: Option<Fault>) -> Bytes {
    let middle = bytes.len() / 2;
    if fault == Some(Fault::Short) {
        return bytes.slice(..middle);
    }
    let mut bytes = bytes.to_vec();
    if let Some(byte) = bytes.get_mut(middle) {
        *byte ^= 0x10;
    }
    bytes.into()
}
