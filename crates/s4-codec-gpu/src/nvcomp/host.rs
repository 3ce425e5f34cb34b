//! Planes in host memory, coded on a GPU: nvCOMP behind the trait of the CPU's codecs.
//!
//! Planes that several threads submit at the same time are coded together, by one call of the
//! library: the thread that finds a free lane also takes the work that others wait for.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, Weak};

use nvcomp_sys::{Nvcomp, Search};
use s4_codec_cpu::blocks::{self, Blocks};
use s4_codec_cpu::{Codec, Context, Encoded, Symbols, Workspace};
use s4_format::manifest::ClosedCodec;
use s4_format::{CodecId, Error, Result};

use super::batch::{Direction, Item, Lane, gpu};
use super::batched::reader;
use super::codec::GpuCodec;
use crate::Cuda;
use crate::device::Device;
use crate::error::GpuError;
use crate::memory::Pool;

/// Calls that run in parallel on a device: one is worked on while another is copied.
const LANES: usize = 2;
/// Device memory of all calls on a device, in bytes.
const SCRATCH: u64 = 256 << 20;
/// Device memory of one call, in bytes; a plane that needs more is coded separately.
const EACH: usize = SCRATCH as usize / LANES - (4 << 20);

/// Why planes cannot be coded on a GPU here.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HostError {
    /// There is no CUDA, or it failed.
    #[error(transparent)]
    Gpu(#[from] GpuError),
    /// There is no nvCOMP that fits.
    #[error(transparent)]
    Library(#[from] nvcomp_sys::Error),
}

/// Opens the library: the file that `NVCOMP_LIBRARY` names, or whatever the dynamic linker finds.
///
/// # Errors
/// `Library` without a library that fits the driver.
pub fn open(cuda: &Cuda) -> Result<Arc<Nvcomp>, HostError> {
    // SAFETY: the library that the user's environment or the system names is meant to be loaded.
    let library = unsafe { Nvcomp::open(&Search::new([])) }?;
    let (major, minor) = cuda.version();
    library.require_driver(1000 * major + 10 * minor)?;
    Ok(Arc::new(library))
}

/// A device with nvCOMP.
#[derive(Debug)]
pub struct Host {
    library: Arc<Nvcomp>,
    device: Arc<Device>,
    pool: Arc<Pool>,
    queue: Mutex<Queue>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Queue {
    waiting: Vec<Arc<Ticket>>,
    idle: Vec<Lane>,
    made: usize,
}

/// A plane that a thread waits for.
#[derive(Debug)]
struct Ticket {
    codec: Arc<dyn GpuCodec>,
    direction: Direction,
    item: Item,
    done: Mutex<Option<Result<Vec<Vec<u8>>>>>,
}

impl Ticket {
    fn done(&self) -> MutexGuard<'_, Option<Result<Vec<Vec<u8>>>>> {
        self.done.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Whether one call can code both.
    fn goes_with(&self, other: &Self) -> bool {
        self.direction == other.direction && Arc::ptr_eq(&self.codec, &other.codec)
    }
}

/// Open hosts: a second reader or writer shares the first one's.
static OPEN: Mutex<Vec<Weak<Host>>> = Mutex::new(Vec::new());

impl Host {
    /// Opens the device whose context is current on this thread, or else the first one, and the
    /// library as [`open`] does.
    ///
    /// # Errors
    /// `Gpu` without CUDA; `Library` without a library that fits it.
    pub fn open() -> Result<Arc<Self>, HostError> {
        let cuda = Cuda::discover()?;
        let library = open(&cuda)?;
        let ordinal = cuda.current();
        let mut open = OPEN.lock().unwrap_or_else(|e| e.into_inner());
        open.retain(|host| host.strong_count() > 0);
        let mut known = open.iter().filter_map(Weak::upgrade);
        if let Some(host) = known.find(|h| h.device.ordinal() == ordinal) {
            return Ok(host);
        }
        let device = cuda.device(ordinal)?;
        let pool = Pool::new(&device, SCRATCH);
        let (queue, changed) = (Mutex::default(), Condvar::new());
        let host = Arc::new(Self { library, device, pool, queue, changed });
        open.push(Arc::downgrade(&host));
        Ok(host)
    }

    /// The library.
    pub fn library(&self) -> &Arc<Nvcomp> {
        &self.library
    }

    /// Every closed bitstream that this library reads, as manifests list them.
    pub fn closed(&self) -> Vec<ClosedCodec> {
        let library_major = self.library.version().major;
        let all = [CodecId::NVCOMP_ANS, CodecId::NVCOMP_BITCOMP, CodecId::NVCOMP_CASCADED];
        all.map(|codec| ClosedCodec { codec, library_major }).to_vec()
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Codes an item, together with those of other threads; returns the outcome of each block.
    ///
    /// # Safety
    /// To decode: an encoder of this bitstream wrote the blocks.
    unsafe fn code(
        &self,
        codec: &Arc<dyn GpuCodec>,
        direction: Direction,
        item: Item,
    ) -> Result<Vec<Vec<u8>>> {
        let (codec, done) = (Arc::clone(codec), Mutex::default());
        let ticket = Arc::new(Ticket { codec, direction, item, done });
        let mut queue = self.queue();
        queue.waiting.push(Arc::clone(&ticket));
        loop {
            if let Some(done) = ticket.done().take() {
                return done;
            }
            let Some(lane) = self.lane(&mut queue, &ticket)? else {
                queue = self.changed.wait(queue).unwrap_or_else(|e| e.into_inner());
                continue;
            };
            let batch = lane_full(&lane, &mut queue.waiting);
            drop(queue);
            // SAFETY: every thread that waits made the same promise as this caller.
            let lane = unsafe { run(lane, &batch) };
            queue = self.queue();
            queue.idle.push(lane);
            self.changed.notify_all();
        }
    }

    /// A free lane, if there is one and work for it; on an error the ticket is removed.
    fn lane(&self, queue: &mut Queue, ticket: &Arc<Ticket>) -> Result<Option<Lane>> {
        if queue.waiting.is_empty() {
            return Ok(None);
        }
        if queue.idle.is_empty() && queue.made < LANES {
            let lane = Lane::new(&self.device, &self.pool).map_err(|e| {
                queue.waiting.retain(|t| !Arc::ptr_eq(t, ticket));
                gpu(e)
            })?;
            queue.made += 1;
            queue.idle.push(lane);
        }
        Ok(queue.idle.pop())
    }
}

/// Takes the first waiting ticket and those that go with it, as many as a call's memory has room for.
fn lane_full(lane: &Lane, waiting: &mut Vec<Arc<Ticket>>) -> Vec<Arc<Ticket>> {
    let mut batch: Vec<Arc<Ticket>> = vec![];
    waiting.retain(|ticket| {
        let Some(first) = batch.first() else {
            batch.push(Arc::clone(ticket));
            return false;
        };
        if !first.goes_with(ticket) {
            return true;
        }
        let items: Vec<&Item> = batch.iter().chain([ticket]).map(|t| &t.item).collect();
        let needs = lane.needs(&*ticket.codec, ticket.direction, &items);
        let fits = needs.is_ok_and(|bytes| bytes <= EACH);
        if fits {
            batch.push(Arc::clone(ticket));
        }
        !fits
    });
    batch
}

/// Does the work of tickets that go together, and answers each.
///
/// # Safety
/// As [`Lane::run`].
unsafe fn run(mut lane: Lane, batch: &[Arc<Ticket>]) -> Lane {
    let Some(first) = batch.first() else { return lane };
    let items: Vec<&Item> = batch.iter().map(|t| &t.item).collect();
    // SAFETY: the caller's.
    match unsafe { lane.run(&*first.codec, first.direction, &items) } {
        Ok(all) => batch.iter().zip(all).for_each(|(ticket, one)| *ticket.done() = Some(one)),
        Err(e) => batch.iter().for_each(|ticket| *ticket.done() = Some(Err(e.clone()))),
    }
    lane
}

/// Encodes planes with a codec of nvCOMP.
#[derive(Debug)]
pub struct HostEncoder {
    host: Arc<Host>,
    codec: Arc<dyn GpuCodec>,
}

impl HostEncoder {
    /// An encoder with a codec of `host`'s library.
    pub fn new(host: &Arc<Host>, codec: impl GpuCodec + 'static) -> Self {
        Self { host: Arc::clone(host), codec: Arc::new(codec) }
    }

    /// The most bytes of any coded block: all are coded as if they could be the longest.
    fn room(&self) -> usize {
        let block = self.codec.block();
        // If the library gives no bound, encoding will report why.
        self.codec.bound(block).unwrap_or(block)
    }
}

impl Codec for HostEncoder {
    fn id(&self) -> CodecId {
        self.codec.id()
    }

    fn bound(&self, _: u8, len: usize) -> usize {
        blocks::bound(len, self.codec.block(), |_| self.room())
    }

    fn encode(&self, symbols: &Symbols<'_>, dst: &mut [u8], _: &mut Workspace) -> Result<Encoded> {
        let (src, block) = (symbols.bytes, self.codec.block());
        let (param, own) = (symbols.context.param, self.codec.param());
        if param != own {
            let id = self.codec.id();
            let what = format!("this engine writes `{id}` with parameter {own}, not {param}");
            return Err(Error::unsupported(what));
        }
        if src.is_empty() {
            return Ok(Encoded::of(0));
        }
        if !src.len().is_multiple_of(self.codec.unit()) {
            let (id, unit, len) = (self.codec.id(), self.codec.unit(), src.len());
            return Err(Error::limit(format!(
                "codec `{id}`: {len} bytes are not a multiple of its unit of {unit} bytes"
            )));
        }
        let room = self.codec.bound(block)?;
        let blocks = (0..src.len()).step_by(block);
        let blocks = blocks.map(|at| (at..src.len().min(at + block), room)).collect();
        let item = Item { data: src.to_vec(), blocks };
        // SAFETY: nothing is decoded.
        let coded = unsafe { self.host.code(&self.codec, Direction::Encode, item) }?;
        let mut coded = coded.into_iter();
        let len = blocks::write(
            src,
            dst,
            block,
            |_| room,
            |_, to| {
                let coded = coded.next().unwrap_or_default();
                let to = to.get_mut(..coded.len());
                let to = to.ok_or_else(|| {
                    Error::limit(format!(
                        "output buffer is too small for a block of {} bytes",
                        coded.len()
                    ))
                })?;
                to.copy_from_slice(&coded);
                Ok(coded.len())
            },
        )?;
        Ok(Encoded::of(len))
    }

    fn decode(&self, _: Context<'_>, _: &[u8], _: &mut [u8], _: &mut Workspace) -> Result<()> {
        Err(Error::unsupported(format!("this engine only writes `{}`", self.codec.id())))
    }
}

/// Decodes the streams of a closed bitstream with nvCOMP.
#[derive(Debug)]
pub struct HostDecoder {
    host: Arc<Host>,
    id: CodecId,
    /// Codecs by parameter; threads that use the same one are served together.
    readers: Mutex<BTreeMap<u8, Arc<dyn GpuCodec>>>,
}

impl HostDecoder {
    /// A decoder for streams of `id`.
    ///
    /// # Safety
    /// It must only be used for streams that nvCOMP wrote: given others, nvCOMP's decoders may
    /// access any device memory.
    pub unsafe fn new(host: &Arc<Host>, id: CodecId) -> Self {
        Self { host: Arc::clone(host), id, readers: Mutex::default() }
    }

    fn reader(&self, param: u8) -> Result<Arc<dyn GpuCodec>> {
        let mut readers = self.readers.lock().unwrap_or_else(|e| e.into_inner());
        if let Some(known) = readers.get(&param) {
            return Ok(Arc::clone(known));
        }
        let codec: Arc<dyn GpuCodec> = Arc::from(reader(&self.host.library, self.id, param)?);
        Ok(Arc::clone(readers.entry(param).or_insert(codec)))
    }
}

impl Codec for HostDecoder {
    fn id(&self) -> CodecId {
        self.id
    }

    fn bound(&self, _: u8, _: usize) -> usize {
        0
    }

    fn encode(&self, _: &Symbols<'_>, _: &mut [u8], _: &mut Workspace) -> Result<Encoded> {
        Err(Error::unsupported(format!("this engine only reads `{}`", self.id)))
    }

    fn decode(
        &self,
        ctx: Context<'_>,
        src: &[u8],
        dst: &mut [u8],
        _: &mut Workspace,
    ) -> Result<()> {
        let codec = self.reader(ctx.param)?;
        if !dst.len().is_multiple_of(codec.unit()) {
            let what = format!(
                "codec `{}`: {} bytes are not a multiple of its unit of {} bytes",
                self.id,
                dst.len(),
                codec.unit()
            );
            return Err(Error::corrupt(what));
        }
        let blocks = Blocks::parse(src, dst.len(), codec.block())?;
        if dst.is_empty() {
            return Ok(());
        }
        let places = blocks.iter().map(|b| (b.stored, b.plane.len())).collect();
        let item = Item { data: src.to_vec(), blocks: places };
        // SAFETY: the creator of the decoder promised that nvCOMP wrote the blocks.
        let decoded = unsafe { self.host.code(&codec, Direction::Decode, item) }?;
        // Each block decoded to exactly its part.
        for (block, bytes) in blocks.iter().zip(decoded) {
            dst[block.plane].copy_from_slice(&bytes);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_gpu_or_the_library_that_is_said() {
        match Host::open() {
            Ok(host) => assert_eq!(host.closed().len(), 3),
            Err(e) => {
                let text = e.to_string();
                assert!(text.contains("CUDA") || text.contains("NVCOMP_LIBRARY"), "{text}");
            }
        }
    }
}
