//! Connects blocking callers with async code: the store's requests run on threads of their own, and
//! any other thread may wait for them.

use std::future::Future;
use std::panic::{AssertUnwindSafe, resume_unwind};
use std::sync::mpsc::{Receiver as Outcome, RecvTimeoutError, sync_channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use futures::FutureExt;
use s4_store::Attempt;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::mpsc::{Receiver, Sender};
use tokio::task::JoinHandle;

use crate::error::{Error, Result};
use crate::interrupt::{self, POLL};
use crate::objects::{DataObject, ObjectSink};
use crate::parallel::{lock, request_threads};
use crate::progress::{Progress, ProgressFn};

/// How long a commit or a clean-up may still take after the caller cancelled.
const GRACE: Duration = Duration::from_millis(400);

/// Runs requests for threads that wait for them. Clones share the threads, which end with the last.
#[derive(Clone)]
pub(crate) struct Bridge {
    owned: Arc<Owned>,
    target: Arc<str>,
}

struct Owned(Option<Runtime>);

impl Drop for Owned {
    fn drop(&mut self) {
        // The last clone may be dropped on one of the runtime's own threads, which must not wait for itself.
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}

impl Bridge {
    pub(crate) fn new(target: &str) -> Result<Self> {
        let runtime = Builder::new_multi_thread()
            .worker_threads(request_threads())
            .thread_name("s4weights-store")
            .enable_all()
            .build()
            .map_err(|e| Error::io(target, "start threads", e))?;
        Ok(Self { owned: Arc::new(Owned(Some(runtime))), target: target.into() })
    }

    pub(crate) fn target(&self) -> &str {
        &self.target
    }

    /// Adds the store's name to an error.
    pub(crate) fn error(&self, source: s4_store::Error) -> Error {
        match source {
            // An error of this crate's own code, which the store called.
            s4_store::Error::Callback(inner) => match inner.downcast::<Error>() {
                Ok(own) => *own,
                Err(inner) => self.error_of(s4_store::Error::Callback(inner)),
            },
            other => self.error_of(other),
        }
    }

    fn error_of(&self, source: s4_store::Error) -> Error {
        Error::Store { target: self.target.to_string(), source: Box::new(source) }
    }

    fn stopped(&self) -> Error {
        let gone = std::io::Error::other("its thread has ended");
        Error::io(&self.target, "finish an operation", gone)
    }

    pub(crate) fn spawn<T: Send + 'static>(
        &self,
        work: impl Future<Output = T> + Send + 'static,
    ) -> Result<JoinHandle<T>> {
        Ok(self.owned.0.as_ref().ok_or_else(|| self.stopped())?.spawn(work))
    }

    /// Waits for a future, on any thread: also on one that must not block a runtime of its own. If
    /// the caller's work is stopped, the future is dropped.
    pub(crate) fn wait<T: Send + 'static>(
        &self,
        work: impl Future<Output = T> + Send + 'static,
    ) -> Result<T> {
        self.wait_asking(&Asker::default(), work)
    }

    /// Waits for a request to the store.
    pub(crate) fn ask<T: Send + 'static>(
        &self,
        work: impl Future<Output = s4_store::Result<T>> + Send + 'static,
    ) -> Result<T> {
        self.wait(work)?.map_err(|e| self.error(e))
    }

    /// As [`Bridge::wait`], but also asks the caller whether to go on. If not, the work is dropped.
    pub(crate) fn wait_asking<T: Send + 'static>(
        &self,
        asker: &Asker,
        work: impl Future<Output = T> + Send + 'static,
    ) -> Result<T> {
        interrupt::check()?;
        let (task, receiver) = self.start(work)?;
        loop {
            if let Some(done) = self.look(&receiver)? {
                return Ok(done);
            }
            if interrupt::is_stopped_now() || !asker.goes_on() {
                task.abort();
                return Err(Error::Cancelled);
            }
        }
    }

    /// Waits for work that should not be cut short: a commit or a clean-up. After the caller cancels it
    /// has a short grace period; then it continues in the background.
    pub(crate) fn wait_to_finish<T: Send + 'static>(
        &self,
        work: impl Future<Output = T> + Send + 'static,
    ) -> Result<T> {
        let (_task, receiver) = self.start(work)?;
        let mut end = None;
        loop {
            if let Some(done) = self.look(&receiver)? {
                return Ok(done);
            }
            if interrupt::is_stopped_now()
                && *end.get_or_insert(Instant::now() + GRACE) < Instant::now()
            {
                return Err(Error::Cancelled);
            }
        }
    }

    /// Starts work and sends its outcome, or its panic, through the channel.
    fn start<T: Send + 'static>(
        &self,
        work: impl Future<Output = T> + Send + 'static,
    ) -> Result<(JoinHandle<()>, Outcome<std::thread::Result<T>>)> {
        let (sender, receiver) = sync_channel(1);
        let task = self.spawn(async move {
            // The caller may have gone away.
            let _ = sender.send(AssertUnwindSafe(work).catch_unwind().await);
        })?;
        Ok((task, receiver))
    }

    /// Waits a moment for an outcome.
    fn look<T>(&self, receiver: &Outcome<std::thread::Result<T>>) -> Result<Option<T>> {
        match receiver.recv_timeout(POLL) {
            Ok(Ok(done)) => Ok(Some(done)),
            // The panic continues in the caller.
            Ok(Err(panic)) => resume_unwind(panic),
            Err(RecvTimeoutError::Timeout) => Ok(None),
            Err(RecvTimeoutError::Disconnected) => Err(self.stopped()),
        }
    }
}

/// Lets the caller cancel, even while there is no progress to report.
#[derive(Clone, Default)]
pub(crate) struct Asker(Option<Arc<Asked>>);

struct Asked {
    callback: ProgressFn,
    last: Mutex<Progress>,
}

impl Asker {
    pub(crate) fn new(callback: Option<ProgressFn>) -> Self {
        let last = Mutex::new(Progress { done: 0, total: u64::MAX });
        Self(callback.map(|callback| Arc::new(Asked { callback, last })))
    }

    /// The progress function for the work to call.
    pub(crate) fn callback(&self) -> Option<ProgressFn> {
        let asked = Arc::clone(self.0.as_ref()?);
        Some(Arc::new(move |progress| {
            *lock(&asked.last) = progress;
            (asked.callback)(progress)
        }))
    }

    fn goes_on(&self) -> bool {
        self.0.as_ref().is_none_or(|asked| {
            let last = *lock(&asked.last);
            (asked.callback)(last)
        })
    }
}

/// The kind that the store's manifest gives to objects of each group of tensors.
const KINDS: [&str; 4] = ["weights", "optimizer", "other", "more"];

/// The group of tensors that an object of this kind holds.
pub(crate) fn group_of(kind: &str) -> u8 {
    let found = KINDS.iter().position(|k| *k == kind);
    found.and_then(|i| u8::try_from(i).ok()).unwrap_or(0)
}

/// Hands a writer's objects to the future that uploads them. The channel limits how many wait
/// between the two; the store decides how many uploads are in flight.
pub(crate) struct ChannelSink {
    pub(crate) bridge: Bridge,
    pub(crate) asker: Asker,
    pub(crate) sender: Sender<DataObject>,
}

impl ObjectSink for ChannelSink {
    fn put(&mut self, object: DataObject) -> Result<()> {
        interrupt::check()?;
        let object = match self.sender.try_send(object) {
            Ok(()) => return Ok(()),
            Err(TrySendError::Full(object)) => object,
            Err(TrySendError::Closed(_)) => return Err(self.bridge.stopped()),
        };
        let sender = self.sender.clone();
        let send = async move { sender.send(object).await.is_ok() };
        match self.bridge.wait_asking(&self.asker, send)? {
            true => Ok(()),
            // The caller gets the upload's own error instead.
            false => Err(self.bridge.stopped()),
        }
    }
}

/// Uploads objects until no more come. A failure closes the channel.
pub(crate) async fn upload(
    attempt: &mut Attempt,
    mut objects: Receiver<DataObject>,
) -> s4_store::Result<()> {
    while let Some(DataObject { number, group, bytes, blake3, .. }) = objects.recv().await {
        let kind = KINDS.get(usize::from(group)).copied().unwrap_or_default();
        attempt.put_hashed(number, kind, bytes, blake3).await?;
    }
    Ok(())
}
