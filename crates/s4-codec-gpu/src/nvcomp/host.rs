//! Planes in host memory, coded on a GPU: nvCOMP behind the trait of the CPU's codecs.
//!
//! Each call copies one plane to the device, codes its blocks, and copies back what they became. Calls
//! from several threads run side by side, each on a stream of its own.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, Weak};

use nvcomp_sys::{Alignments, Compress, Decompress, Nvcomp, Search, Shape, Status};
use s4_codec_cpu::blocks::{self, Blocks};
use s4_codec_cpu::{Codec, Context, Encoded};
use s4_format::manifest::ClosedCodec;
use s4_format::{CodecId, Error, Result};

use super::batched::reader;
use super::codec::{GpuCodec, Needs};
use crate::device::{Device, Stream};
use crate::error::GpuError;
use crate::memory::{DeviceBuffer, Pinned, Pool};
use crate::{Cuda, nvcomp};

/// Calls that run side by side on a device; others wait.
const LANES: usize = 16;
/// Device memory of all calls on a device, in bytes.
const SCRATCH: u64 = 256 << 20;
/// Alignment of everything in a call's memory: more than any codec asks for.
const ALIGN: usize = 256;

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

/// A device with nvCOMP.
#[derive(Debug)]
pub struct Host {
    library: Arc<Nvcomp>,
    device: Arc<Device>,
    pool: Arc<Pool>,
    lanes: Mutex<Lanes>,
    returned: Condvar,
}

#[derive(Debug, Default)]
struct Lanes {
    idle: Vec<Lane>,
    made: usize,
}

/// What one call needs.
#[derive(Debug)]
struct Lane {
    stream: Arc<Stream>,
    /// Grows to what a call needs and stays.
    pinned: Option<Pinned>,
}

/// What is open: a second reader or writer shares it with the first.
static OPEN: Mutex<Vec<Weak<Host>>> = Mutex::new(Vec::new());

impl Host {
    /// Opens the device whose context is current on this thread, or else the first one, and the
    /// library: the file that `NVCOMP_LIBRARY` names, or whatever the dynamic linker finds.
    ///
    /// # Errors
    /// `Gpu` without CUDA; `Library` without a library that fits it.
    pub fn open() -> Result<Arc<Self>, HostError> {
        let cuda = Cuda::discover()?;
        // SAFETY: the library that the user's environment or the system names is meant to be loaded.
        let library = unsafe { Nvcomp::open(&Search::new([])) }?;
        let (major, minor) = cuda.version();
        library.require_driver(1000 * major + 10 * minor)?;
        let ordinal = cuda.current();
        let mut open = OPEN.lock().unwrap_or_else(|e| e.into_inner());
        open.retain(|host| host.strong_count() > 0);
        let mut known = open.iter().filter_map(Weak::upgrade);
        if let Some(host) = known.find(|h| h.device.ordinal() == ordinal) {
            return Ok(host);
        }
        let device = cuda.device(ordinal)?;
        let pool = Pool::new(&device, SCRATCH)?;
        let (library, lanes, returned) = (Arc::new(library), Mutex::default(), Condvar::new());
        let host = Arc::new(Self { library, device, pool, lanes, returned });
        open.push(Arc::downgrade(&host));
        Ok(host)
    }

    /// The library.
    pub fn library(&self) -> &Arc<Nvcomp> {
        &self.library
    }

    /// Every closed bitstream that is read here, as manifests list them.
    pub fn closed(&self) -> Vec<ClosedCodec> {
        let library_major = self.library.version().major;
        let all = [CodecId::NVCOMP_ANS, CodecId::NVCOMP_BITCOMP, CodecId::NVCOMP_CASCADED];
        all.map(|codec| ClosedCodec { codec, library_major }).to_vec()
    }

    fn lanes(&self) -> MutexGuard<'_, Lanes> {
        self.lanes.lock().unwrap_or_else(|e| e.into_inner())
    }

    /// Runs `work` with a lane, once there is one.
    fn with<T>(&self, work: impl FnOnce(&mut Lane) -> Result<T>) -> Result<T> {
        let mut lane = self.take().map_err(gpu)?;
        let done = work(&mut lane);
        if done.is_err() {
            // What was queued may still use the lane's memory.
            let _ = lane.stream.synchronize();
        }
        self.lanes().idle.push(lane);
        self.returned.notify_one();
        done
    }

    fn take(&self) -> Result<Lane, GpuError> {
        let mut lanes = self.lanes();
        loop {
            if let Some(lane) = lanes.idle.pop() {
                return Ok(lane);
            }
            if lanes.made < LANES {
                let stream = Arc::new(Stream::new(&self.device)?);
                lanes.made += 1;
                return Ok(Lane { stream, pinned: None });
            }
            lanes = self.returned.wait(lanes).unwrap_or_else(|e| e.into_inner());
        }
    }
}

/// Encodes planes with a codec of nvCOMP.
#[derive(Debug)]
pub struct HostEncoder {
    host: Arc<Host>,
    codec: Box<dyn GpuCodec>,
}

impl HostEncoder {
    /// An encoder with a codec of `host`'s library.
    pub fn new(host: &Arc<Host>, codec: impl GpuCodec + 'static) -> Self {
        Self { host: Arc::clone(host), codec: Box::new(codec) }
    }
}

impl Codec for HostEncoder {
    fn id(&self) -> CodecId {
        self.codec.id()
    }

    fn bound(&self, len: usize) -> usize {
        // Where the library gives no bound, encoding says why.
        blocks::bound(len, self.codec.block(), |n| self.codec.bound(n).unwrap_or(n))
    }

    fn encode(&self, _: Context<'_>, src: &[u8], dst: &mut [u8]) -> Result<Encoded> {
        let param = self.codec.param();
        if src.is_empty() {
            return Ok(Encoded { len: 0, param });
        }
        if !src.len().is_multiple_of(self.codec.unit()) {
            let (id, unit, len) = (self.codec.id(), self.codec.unit(), src.len());
            return Err(Error::limit(format!("{len} bytes for `{id}`, in units of {unit}")));
        }
        let len = self.host.with(|lane| lane.encode(&self.host, &*self.codec, src, dst))?;
        Ok(Encoded { len, param })
    }

    fn decode(&self, _: u8, _: Context<'_>, _: &[u8], _: &mut [u8]) -> Result<()> {
        Err(Error::unsupported(format!("this engine only writes `{}`", self.codec.id())))
    }
}

/// Decodes the streams of a closed bitstream with nvCOMP.
#[derive(Debug)]
pub struct HostDecoder {
    host: Arc<Host>,
    id: CodecId,
}

impl HostDecoder {
    /// A decoder for streams of `id`.
    ///
    /// # Safety
    /// Only streams that nvCOMP wrote are decoded with it: its decoders may access any device memory
    /// when they are given others.
    pub unsafe fn new(host: &Arc<Host>, id: CodecId) -> Self {
        Self { host: Arc::clone(host), id }
    }
}

impl Codec for HostDecoder {
    fn id(&self) -> CodecId {
        self.id
    }

    fn bound(&self, _: usize) -> usize {
        0
    }

    fn encode(&self, _: Context<'_>, _: &[u8], _: &mut [u8]) -> Result<Encoded> {
        Err(Error::unsupported(format!("this engine only reads `{}`", self.id)))
    }

    fn decode(&self, param: u8, _: Context<'_>, src: &[u8], dst: &mut [u8]) -> Result<()> {
        let codec = reader(&self.host.library, self.id, param)?;
        if !dst.len().is_multiple_of(codec.unit()) {
            let what =
                format!("`{}` of {} bytes, in units of {}", self.id, dst.len(), codec.unit());
            return Err(Error::corrupt(what));
        }
        let blocks = Blocks::parse(src, dst.len(), codec.block())?;
        if dst.is_empty() {
            return Ok(());
        }
        self.host.with(|lane| lane.decode(&self.host, &*codec, blocks, src, dst))
    }
}

/// Where the parts of a call's memory lie. On the device and in pinned memory they are at the same
/// places, but for the scratch memory, which is the device's alone.
struct Parts {
    count: usize,
    /// Bytes of the plane or stream.
    data: usize,
    /// Bytes of all outputs.
    out: usize,
}

impl Parts {
    /// Four arrays of 8 bytes for each block stand first: inputs, their sizes, outputs, capacities.
    fn array(&self, number: usize) -> usize {
        8 * self.count * number
    }

    fn data_at(&self) -> usize {
        self.array(4).next_multiple_of(ALIGN)
    }

    /// Where the answers are: a size of 8 bytes, then a status of 4 bytes, for each block. Decoders
    /// look a little past the end of a block: that is memory too.
    fn answers_at(&self) -> usize {
        (self.data_at() + self.data + ALIGN).next_multiple_of(ALIGN)
    }

    fn statuses_at(&self) -> usize {
        self.answers_at() + 8 * self.count
    }

    fn out_at(&self) -> usize {
        (self.statuses_at() + 4 * self.count).next_multiple_of(ALIGN)
    }

    fn end(&self) -> usize {
        self.out_at() + self.out
    }

    fn scratch_at(&self) -> usize {
        self.end().next_multiple_of(ALIGN)
    }
}

/// The memory of a call, with what goes up in its pinned part.
struct Call<'a> {
    stream: &'a Arc<Stream>,
    pinned: &'a Pinned,
    device: DeviceBuffer,
    parts: Parts,
    scratch_bytes: usize,
}

impl Lane {
    fn call(&mut self, host: &Host, parts: Parts, needs: &Needs) -> Result<Call<'_>> {
        let Alignments { input, output, scratch } = needs.alignments;
        // Blocks of a stream start at multiples of 16.
        if [input, output, scratch].iter().any(|a| *a == 0 || !blocks::ALIGN.is_multiple_of(*a)) {
            return Err(Error::unsupported(format!("alignments of {:?}", needs.alignments)));
        }
        let bytes = (parts.scratch_at() + needs.scratch.max(1)) as u64;
        let device = host.pool.alloc(&self.stream, bytes, "a plane for nvCOMP").map_err(gpu)?;
        let pinned = match self.pinned.take().filter(|p| p.len() >= parts.end()) {
            Some(pinned) => pinned,
            None => {
                Pinned::new(&host.device, parts.end().next_multiple_of(64 << 10)).map_err(gpu)?
            }
        };
        let pinned = self.pinned.insert(pinned);
        Ok(Call { stream: &self.stream, pinned, device, parts, scratch_bytes: needs.scratch })
    }

    fn encode(
        &mut self,
        host: &Host,
        codec: &dyn GpuCodec,
        src: &[u8],
        dst: &mut [u8],
    ) -> Result<usize> {
        let block = codec.block();
        let sizes: Vec<usize> = src.chunks(block).map(<[u8]>::len).collect();
        let shape =
            Shape { blocks: sizes.len(), max_block: block.min(src.len()), total: src.len() };
        let needs = {
            let _current = host.device.enter().map_err(gpu)?;
            codec.encode_needs(shape, self.stream.address())?
        };
        let room = codec.bound(shape.max_block)?;
        let slot = room.next_multiple_of(ALIGN);
        let parts = Parts { count: sizes.len(), data: src.len(), out: slot * sizes.len() };
        let call = self.call(host, parts, &needs)?;
        let places = sizes.iter().enumerate();
        let places =
            places.map(|(i, len)| Place { from: i * block, len: *len, to: i * slot, room });
        call.fill(places, src);
        let at = |offset: usize| call.device.address() + offset as u64;
        let parts = &call.parts;
        let batch = Compress {
            inputs: at(parts.array(0)),
            input_sizes: at(parts.array(1)),
            outputs: at(parts.array(2)),
            output_sizes: at(parts.answers_at()),
            scratch: at(parts.scratch_at()),
            scratch_bytes: call.scratch_bytes,
            statuses: at(parts.statuses_at()),
        };
        // SAFETY: everything is as large and aligned as the batch says, in memory that stays until the
        // stream is done: `run` waits for it, and `with` does after an error.
        call.run(host, |stream| unsafe { codec.encode(shape, batch, stream) })?;
        let coded = call.answers(codec.id())?;
        if let Some(len) = coded.iter().find(|len| **len == 0 || **len > room as u64) {
            let id = codec.id();
            return Err(Error::unsupported(format!("nvCOMP gave a block of {len} bytes (`{id}`)")));
        }
        let mut next = 0;
        let bound = |n| codec.bound(n).unwrap_or(n);
        blocks::write(src, dst, block, bound, |_, to| {
            // At most `room`, which was checked.
            let (at, len) = (call.parts.out_at() + next * slot, coded[next] as usize);
            next += 1;
            let to = to.get_mut(..len);
            let to =
                to.ok_or_else(|| Error::limit(format!("no room for a block of {len} bytes")))?;
            to.copy_from_slice(call.bytes(at, len));
            Ok(len)
        })
    }

    fn decode(
        &mut self,
        host: &Host,
        codec: &dyn GpuCodec,
        blocks: Blocks<'_>,
        src: &[u8],
        dst: &mut [u8],
    ) -> Result<()> {
        let shape = Shape {
            blocks: blocks.iter().count(),
            max_block: codec.block().min(dst.len()),
            total: dst.len(),
        };
        let needs = {
            let _current = host.device.enter().map_err(gpu)?;
            codec.decode_needs(shape, self.stream.address())?
        };
        let parts = Parts { count: shape.blocks, data: src.len(), out: dst.len() };
        let call = self.call(host, parts, &needs)?;
        let place = |b: blocks::Block| Place {
            from: b.stored.start,
            len: b.stored.len(),
            to: b.plane.start,
            room: b.plane.len(),
        };
        call.fill(blocks.iter().map(place), src);
        let at = |offset: usize| call.device.address() + offset as u64;
        let parts = &call.parts;
        let batch = Decompress {
            inputs: at(parts.array(0)),
            input_sizes: at(parts.array(1)),
            outputs: at(parts.array(2)),
            output_capacities: at(parts.array(3)),
            output_sizes: at(parts.answers_at()),
            scratch: at(parts.scratch_at()),
            scratch_bytes: call.scratch_bytes,
            statuses: at(parts.statuses_at()),
        };
        // SAFETY: as in `encode`; who made the decoder promised that nvCOMP wrote the blocks.
        call.run(host, |stream| unsafe { codec.decode(shape, batch, stream) })?;
        for (number, (len, block)) in
            call.answers(codec.id())?.iter().zip(blocks.iter()).enumerate()
        {
            if *len != block.plane.len() as u64 {
                let expected = block.plane.len();
                let what = format!("block {number}: {len} bytes decoded, {expected} expected");
                return Err(Error::corrupt(what));
            }
        }
        dst.copy_from_slice(call.bytes(call.parts.out_at(), dst.len()));
        Ok(())
    }
}

/// A block's place in the data, and that of what it becomes among the outputs.
struct Place {
    from: usize,
    len: usize,
    to: usize,
    room: usize,
}

impl Call<'_> {
    /// Writes arrays and data into pinned memory.
    fn fill(&self, places: impl Iterator<Item = Place>, data: &[u8]) {
        let parts = &self.parts;
        let at = parts.data_at();
        // SAFETY: this call's alone, and nothing is under way on it.
        let bytes = unsafe { self.pinned.slice_mut(0, at + data.len()) };
        bytes[at..].copy_from_slice(data);
        let base = self.device.address();
        let (data_at, out_at) = (base + at as u64, base + parts.out_at() as u64);
        for (i, Place { from, len, to, room }) in places.enumerate() {
            let fields = [data_at + from as u64, len as u64, out_at + to as u64, room as u64];
            for (number, field) in fields.iter().enumerate() {
                bytes[parts.array(number) + 8 * i..][..8].copy_from_slice(&field.to_ne_bytes());
            }
        }
    }

    /// Copies up, has the work queued, copies the answers and outputs back, and waits.
    fn run(&self, host: &Host, work: impl FnOnce(u64) -> nvcomp::Result<()>) -> Result<()> {
        let (parts, stream) = (&self.parts, self.stream);
        let (up, down) = (parts.data_at() + parts.data, parts.answers_at());
        let address = self.device.address();
        // SAFETY: device memory of this size, and pinned memory that is this call's alone.
        unsafe { stream.copy_to_device(self.pinned, 0, up, address) }.map_err(gpu)?;
        {
            let _current = host.device.enter().map_err(gpu)?;
            work(stream.address())?;
        }
        let len = parts.end() - down;
        // SAFETY: as above.
        unsafe { stream.copy_to_host(address + down as u64, self.pinned, down, len) }
            .map_err(gpu)?;
        stream.synchronize().map_err(gpu)
    }

    fn bytes(&self, at: usize, len: usize) -> &[u8] {
        // SAFETY: the copies were waited for.
        unsafe { self.pinned.slice(at, len) }
    }

    /// The size that each block came to, if all of them succeeded.
    fn answers(&self, id: CodecId) -> Result<Vec<u64>> {
        let parts = &self.parts;
        let (statuses, _) = self.bytes(parts.statuses_at(), 4 * parts.count).as_chunks::<4>();
        for (number, status) in statuses.iter().enumerate() {
            let status = Status(i32::from_ne_bytes(*status));
            if status != Status::SUCCESS {
                return Err(Error::corrupt(format!("nvCOMP, `{id}`, block {number}: {status}")));
            }
        }
        let (sizes, _) = self.bytes(parts.answers_at(), 8 * parts.count).as_chunks::<8>();
        Ok(sizes.iter().map(|size| u64::from_ne_bytes(*size)).collect())
    }
}

/// A GPU's error where codecs have theirs.
fn gpu(error: GpuError) -> Error {
    match error {
        GpuError::Budget { .. } | GpuError::OutOfMemory { .. } => Error::limit(error.to_string()),
        _ => Error::unsupported(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_parts_of_a_call_lie_side_by_side() {
        for count in [1, 2, 31, 500] {
            for data in [1, 255, 256, 100_000] {
                let p = Parts { count, data, out: 3 * data };
                assert!(p.data_at() >= 32 * count && p.data_at().is_multiple_of(ALIGN));
                assert!(p.answers_at() >= p.data_at() + data + ALIGN);
                assert_eq!(p.statuses_at(), p.answers_at() + 8 * count);
                assert!(
                    p.out_at() >= p.statuses_at() + 4 * count && p.out_at().is_multiple_of(ALIGN)
                );
                assert!(p.scratch_at() >= p.end() && p.scratch_at().is_multiple_of(ALIGN));
            }
        }
    }

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
