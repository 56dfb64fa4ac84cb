//! Memory for bulk bytes: recycled, and on request readable by other processes of the same user on the same host.
//!
//! An [`Arena`] hands out buffers of a few sizes, again and again, so that a gradient of the next step lands on pages that are warm already.
//! A *shared* arena lies in memfds. A peer on the same host (same boot, same process namespace) opens them by way of `/proc`, which the
//! kernel allows to the same user only, and checks the random name that the authenticated connection told it. It gets them for
//! reading; they are sealed against any other writer and against shrinking, so neither side can fault or overwrite the other.
//!
//! What a process wrote stays readable after its death, for as long as a peer has it mapped.
//!
//! The contract of a shared arena: bytes that were sent stay unchanged until two calls of [`Arena::advance`] after their buffer was dropped.
//! Whoever calls it must know that the peers are done with them by then; a step machine whose members are at most one step
//! apart does, if it calls it once a step. A reader that was thrown out may see other bytes: what binds carries a digest of its own.

#![expect(unsafe_code, reason = "mapped memory is used through raw pointers, here alone")]

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::io;
use std::ops::{Deref, DerefMut};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use rand::TryRngCore as _;
use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags};
use rustix::mm::{Advice, MapFlags, ProtFlags};

/// Hands out buffers for bulk bytes. Cheap to clone; buffers keep what they lie in alive.
#[derive(Clone)]
pub struct Arena(Arc<Inner>);

struct Inner {
    /// Of a shared arena: the random part of its memfds' names.
    token: Option<Token>,
    places: Mutex<Places>,
}

pub(crate) type Token = [u8; 16];

#[derive(Default)]
struct Places {
    tick: u64,
    /// By address.
    segments: BTreeMap<usize, Arc<Segment>>,
    /// By size.
    free: BTreeMap<usize, Vec<Place>>,
    /// Dropped, but perhaps still read by a peer; with the tick at which they were dropped.
    limbo: VecDeque<(u64, Place)>,
    /// Where the next small buffer is cut from, and how much of it is used.
    slab: Option<(Arc<Segment>, usize)>,
    next_id: u32,
}

#[derive(Clone)]
struct Place {
    segment: Arc<Segment>,
    offset: usize,
    size: usize,
}

impl Arena {
    /// An arena of this process alone.
    #[must_use]
    pub fn private() -> Self {
        Self(Arc::new(Inner { token: None, places: Mutex::default() }))
    }

    /// An arena that peers on this host may read. Private if the system has no memfds.
    ///
    /// # Panics
    /// If the system gives no randomness.
    #[must_use]
    pub fn shared() -> Self {
        let mut token: Token = [0; 16];
        rand::rngs::OsRng
            .try_fill_bytes(&mut token)
            .expect("the system gives randomness once it has booted");
        // A first small segment, by which a peer can tell that it may read the others.
        match Segment::shared(PROBE_BYTES, 0, token) {
            Ok(probe) => {
                let segments = BTreeMap::from([(probe.address(), Arc::new(probe))]);
                let places = Places { segments, next_id: 1, ..Places::default() };
                Self(Arc::new(Inner { token: Some(token), places: Mutex::new(places) }))
            }
            Err(error) => {
                tracing::info!(%error, "no shared memory here: members on this host exchange by QUIC");
                Self::private()
            }
        }
    }

    /// Whether peers on this host may read it.
    #[must_use]
    pub fn is_shared(&self) -> bool {
        self.0.token.is_some()
    }

    /// A buffer of `len` bytes, aligned to a cache line. What is in it is left from before, or zero.
    ///
    /// # Panics
    /// If the system has no more memory.
    #[must_use]
    pub fn allocate(&self, len: usize) -> ArenaBuffer {
        let size = len.max(1).next_multiple_of(ALIGNMENT);
        let mut places = self.places();
        let place = match places.free.get_mut(&size).and_then(Vec::pop) {
            Some(place) => place,
            None => self.cut(&mut places, size).expect("the system has memory for a buffer"),
        };
        drop(places);
        ArenaBuffer { place: Some(place), len, arena: self.clone() }
    }

    /// Says that a step is over: buffers that were dropped before the last call may be written again.
    pub fn advance(&self) {
        let mut places = self.places();
        places.tick += 1;
        while places.limbo.front().is_some_and(|(tick, _)| tick + 2 <= places.tick) {
            if let Some((_, place)) = places.limbo.pop_front() {
                places.free.entry(place.size).or_default().push(place);
            }
        }
    }

    /// Where bytes lie that peers may read: number and descriptor of the segment, and the offset there.
    pub(crate) fn locate(&self, bytes: &[u8]) -> Option<Location> {
        self.0.token?;
        let address = bytes.as_ptr() as usize;
        let places = self.places();
        let (base, segment) = places.segments.range(..=address).next_back()?;
        let offset = address - base;
        let fits = offset.checked_add(bytes.len()).is_some_and(|end| end <= segment.len);
        let descriptor = segment.memfd.as_ref().filter(|_| fits)?.as_raw_fd();
        Some(Location {
            segment: segment.id,
            descriptor: u32::try_from(descriptor).ok()?,
            offset: offset as u64,
            len: bytes.len() as u64,
        })
    }

    /// What a peer must know to read this arena, and its first segment.
    pub(crate) fn offer(&self) -> Option<Offer> {
        let token = self.0.token?;
        let places = self.places();
        let probe = places.segments.values().find(|segment| segment.id == 0)?;
        let descriptor = u32::try_from(probe.memfd.as_ref()?.as_raw_fd()).ok()?;
        Some(Offer { host: host_identity()?, process: std::process::id(), token, descriptor })
    }

    fn cut(&self, places: &mut Places, size: usize) -> io::Result<Place> {
        if size >= SLAB_BYTES / 2 {
            let segment = self.add_segment(places, size)?;
            return Ok(Place { segment, offset: 0, size });
        }
        let (segment, used) = match places.slab.take() {
            Some((segment, used)) if used + size <= segment.len => (segment, used),
            _ => (self.add_segment(places, SLAB_BYTES)?, 0),
        };
        places.slab = Some((Arc::clone(&segment), used + size));
        Ok(Place { segment, offset: used, size })
    }

    fn add_segment(&self, places: &mut Places, len: usize) -> io::Result<Arc<Segment>> {
        let id = places.next_id;
        places.next_id += 1;
        let segment = match self.0.token {
            // Bytes that lie elsewhere are sent as bytes.
            Some(token) => {
                Segment::shared(len, id, token).or_else(|_| Segment::private(len, id))?
            }
            None => Segment::private(len, id)?,
        };
        let segment = Arc::new(segment);
        places.segments.insert(segment.address(), Arc::clone(&segment));
        Ok(segment)
    }

    fn give_back(&self, place: Place) {
        let mut places = self.places();
        if self.is_shared() {
            let tick = places.tick;
            places.limbo.push_back((tick, place));
        } else {
            places.free.entry(place.size).or_default().push(place);
        }
    }

    fn places(&self) -> MutexGuard<'_, Places> {
        self.0.places.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Arena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Arena({} segments)", self.places().segments.len())
    }
}

/// Bytes that one owner may write, until they are frozen.
pub struct ArenaBuffer {
    /// `None` once it is given back or frozen.
    place: Option<Place>,
    len: usize,
    arena: Arena,
}

impl ArenaBuffer {
    /// The same bytes, never written again until all copies of the result are dropped.
    #[must_use]
    pub fn freeze(self) -> Bytes {
        Bytes::from_owner(Frozen(self))
    }
}

impl Deref for ArenaBuffer {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        let Some(place) = &self.place else { return &[] };
        // SAFETY: the place lies within its segment, which lives as long as the place; nobody else has this place.
        unsafe { std::slice::from_raw_parts(place.start(), self.len) }
    }
}

impl DerefMut for ArenaBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        let Some(place) = &self.place else { return &mut [] };
        // SAFETY: as for `deref`, and the buffer is borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(place.start(), self.len) }
    }
}

impl Drop for ArenaBuffer {
    fn drop(&mut self) {
        if let Some(place) = self.place.take() {
            self.arena.give_back(place);
        }
    }
}

impl fmt::Debug for ArenaBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ArenaBuffer({} bytes)", self.len)
    }
}

struct Frozen(ArenaBuffer);

impl AsRef<[u8]> for Frozen {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl Place {
    fn start(&self) -> *mut u8 {
        debug_assert!(self.offset + self.size <= self.segment.len);
        // SAFETY: the offset lies within the segment's mapping.
        unsafe { self.segment.base.as_ptr().add(self.offset) }
    }
}

/// Mapped memory of this process.
struct Segment {
    id: u32,
    base: NonNull<u8>,
    len: usize,
    /// What peers open; `None` if they can't.
    memfd: Option<OwnedFd>,
}

// SAFETY: the mapping belongs to the segment and does not move; who reads and writes in it is decided by the places cut from it.
unsafe impl Send for Segment {}
// SAFETY: as above.
unsafe impl Sync for Segment {}

impl Segment {
    fn private(len: usize, id: u32) -> io::Result<Self> {
        // SAFETY: a new anonymous mapping overlaps with nothing.
        let base = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE,
            )
        }?;
        Self::new(id, base.cast(), len, None)
    }

    fn shared(len: usize, id: u32, token: Token) -> io::Result<Self> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let memfd = rustix::fs::memfd_create(memfd_name(token), flags)?;
        rustix::fs::ftruncate(&memfd, len as u64)?;
        // SAFETY: a new mapping overlaps with nothing; the file has the length mapped, and is sealed against shrinking below, before
        // anybody else can know of it.
        let base = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED,
                &memfd,
                0,
            )
        }?;
        let segment = Self::new(id, base.cast(), len, Some(memfd))?;
        if let Some(memfd) = &segment.memfd {
            rustix::fs::fcntl_add_seals(memfd, SEALS)?;
        }
        Ok(segment)
    }

    fn new(id: u32, base: *mut u8, len: usize, memfd: Option<OwnedFd>) -> io::Result<Self> {
        let base = NonNull::new(base).ok_or(io::ErrorKind::OutOfMemory)?;
        // Fewer, larger pages where the system has them; it need not.
        // SAFETY: advice about a mapping that was just made and holds nothing.
        let _ = unsafe { rustix::mm::madvise(base.as_ptr().cast(), len, Advice::LinuxHugepage) };
        Ok(Self { id, base, len, memfd })
    }

    fn address(&self) -> usize {
        self.base.as_ptr() as usize
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        // SAFETY: all places cut from the segment hold it, so nothing refers to the mapping any more.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

/// What a process tells its peers so that they can read its arena.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Offer {
    host: HostIdentity,
    process: u32,
    token: Token,
    descriptor: u32,
}

impl Offer {
    pub(crate) const BYTES: usize = 16 + 8 + 4 + 16 + 4;

    pub(crate) fn encode(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..16].copy_from_slice(&self.host.boot);
        bytes[16..24].copy_from_slice(&self.host.processes.to_le_bytes());
        bytes[24..28].copy_from_slice(&self.process.to_le_bytes());
        bytes[28..44].copy_from_slice(&self.token);
        bytes[44..].copy_from_slice(&self.descriptor.to_le_bytes());
        bytes
    }

    pub(crate) fn decode(bytes: &[u8; Self::BYTES]) -> Self {
        let number = |at: usize| {
            u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
        };
        let mut host = HostIdentity { boot: [0; 16], processes: 0 };
        host.boot.copy_from_slice(&bytes[..16]);
        host.processes = u64::from(number(16)) | u64::from(number(20)) << 32;
        let mut token = [0; 16];
        token.copy_from_slice(&bytes[28..44]);
        Self { host, process: number(24), token, descriptor: number(44) }
    }
}

/// Where bytes lie in the memory of the process that sent this.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Location {
    pub(crate) segment: u32,
    pub(crate) descriptor: u32,
    pub(crate) offset: u64,
    pub(crate) len: u64,
}

impl Location {
    pub(crate) const BYTES: usize = 24;

    pub(crate) fn encode(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..4].copy_from_slice(&self.segment.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.descriptor.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.offset.to_le_bytes());
        bytes[16..].copy_from_slice(&self.len.to_le_bytes());
        bytes
    }

    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let bytes: &[u8; Self::BYTES] = bytes.try_into().ok()?;
        let (numbers, _) = bytes.as_chunks::<4>();
        let number = |at: usize| u32::from_le_bytes(numbers[at]);
        let long = |at: usize| u64::from(number(at)) | u64::from(number(at + 1)) << 32;
        Some(Self { segment: number(0), descriptor: number(1), offset: long(2), len: long(4) })
    }
}

/// The memory of a peer on this host, as far as it was needed.
#[derive(Debug)]
pub(crate) struct PeerMemory {
    offer: Offer,
    mapped: Mutex<BTreeMap<u32, Arc<Mapping>>>,
}

impl PeerMemory {
    /// Opens what a peer offers; why not, if this process can't read it.
    pub(crate) fn open(offer: Offer) -> Result<Self, String> {
        if Some(offer.host) != host_identity() {
            return Err("it is on another host, or in another container".to_owned());
        }
        let memory = Self { offer, mapped: Mutex::default() };
        let probe = Location { segment: 0, descriptor: offer.descriptor, offset: 0, len: 1 };
        memory.read(probe).map(|_| memory).map_err(|error| error.to_string())
    }

    /// The bytes at a location, without a copy.
    pub(crate) fn read(&self, at: Location) -> io::Result<Bytes> {
        let mapping = {
            let mut mapped = self.mapped.lock().unwrap_or_else(PoisonError::into_inner);
            match mapped.get(&at.segment) {
                Some(mapping) => Arc::clone(mapping),
                None if mapped.len() >= PEER_SEGMENTS_MAX => {
                    return Err(io::Error::other("a peer with too many segments"));
                }
                None => {
                    let mapping = Arc::new(Mapping::open(&self.offer, at.descriptor)?);
                    mapped.insert(at.segment, Arc::clone(&mapping));
                    mapping
                }
            }
        };
        let end = at.offset.checked_add(at.len).filter(|end| *end <= mapping.len as u64);
        if end.is_none() {
            return Err(io::Error::other("a place outside of the peer's memory"));
        }
        Ok(Bytes::from_owner(Extent { mapping, offset: at.offset as usize, len: at.len as usize }))
    }
}

/// A peer's segment, mapped for reading.
#[derive(Debug)]
struct Mapping {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping belongs to this value, does not move and is only read.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn open(offer: &Offer, descriptor: u32) -> io::Result<Self> {
        let path = format!("/proc/{}/fd/{descriptor}", offer.process);
        let memfd = rustix::fs::open(&path, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
        // The number of an ended process may be another's by now, so what was opened must bear the name that only the peer knows.
        let own = format!("/proc/self/fd/{}", memfd.as_raw_fd());
        let name = rustix::fs::readlink(own, Vec::new())?;
        if name.as_bytes() != format!("/memfd:{} (deleted)", memfd_name(offer.token)).as_bytes() {
            return Err(io::Error::other("the descriptor is of another process"));
        }
        if !rustix::fs::fcntl_get_seals(&memfd)?.contains(SEALS) {
            return Err(io::Error::other("the peer's memory is not sealed"));
        }
        let len = usize::try_from(rustix::fs::fstat(&memfd)?.st_size).map_err(io::Error::other)?;
        // SAFETY: a new mapping overlaps with nothing; the file can't shrink any more, so no page of it can vanish.
        let base = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ,
                MapFlags::SHARED,
                &memfd,
                0,
            )
        }?;
        let base = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        Ok(Self { base, len })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: all extents of the mapping hold it, so nothing refers to it any more.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

struct Extent {
    mapping: Arc<Mapping>,
    offset: usize,
    len: usize,
}

impl AsRef<[u8]> for Extent {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: checked to lie within the mapping, which this holds. The peer leaves the bytes as they are by the contract of a shared
        // arena; bytes that are read past its end are any numbers, never an invalid value.
        unsafe { std::slice::from_raw_parts(self.mapping.base.as_ptr().add(self.offset), self.len) }
    }
}

/// Tells hosts and containers apart: the boot, and the namespace in which process numbers count.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct HostIdentity {
    boot: [u8; 16],
    processes: u64,
}

fn host_identity() -> Option<HostIdentity> {
    let text = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    let digits: String = text.chars().filter(char::is_ascii_hexdigit).collect();
    let boot = hex::decode(digits).ok()?.try_into().ok()?;
    let processes = rustix::fs::stat("/proc/self/ns/pid").ok()?.st_ino;
    Some(HostIdentity { boot, processes })
}

fn memfd_name(token: Token) -> String {
    format!("ripstop-{}", hex::encode(token))
}

/// Only the mapping that was made before can write, and nobody can change the length.
const SEALS: SealFlags =
    SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::FUTURE_WRITE).union(SealFlags::SEAL);
/// A cache line: the widest vector load never straddles two.
const ALIGNMENT: usize = 64;
/// What small buffers are cut from.
const SLAB_BYTES: usize = 16 << 20;
const PROBE_BYTES: usize = 4096;
/// More than any gradient needs; a bound against a peer that makes up numbers.
const PEER_SEGMENTS_MAX: usize = 65_536;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_private_buffer_is_used_again_as_soon_as_it_is_dropped() {
        let arena = Arena::private();
        let mut buffer = arena.allocate(100);
        buffer.fill(7);
        let address = buffer.as_ptr();
        let frozen = buffer.freeze();
        assert_eq!(frozen, vec![7; 100]);
        assert_ne!(arena.allocate(100).as_ptr(), address, "it is held");
        drop(frozen);
        assert!([arena.allocate(100), arena.allocate(100)].iter().any(|b| b.as_ptr() == address));
        assert!(arena.locate(&arena.allocate(100)).is_none(), "nobody else can read it");
    }

    #[test]
    fn a_shared_buffer_rests_for_two_steps_before_it_is_written_again() {
        let arena = Arena::shared();
        let buffer = arena.allocate(100);
        let address = buffer.as_ptr();
        drop(buffer);
        let mut others = Vec::new();
        for _ in 0..2 {
            others.push(arena.allocate(100));
            arena.advance();
        }
        assert!(others.iter().all(|other| other.as_ptr() != address));
        assert_eq!(arena.allocate(100).as_ptr(), address);
    }

    #[test]
    fn a_peer_reads_what_was_written_and_nothing_else() {
        let arena = Arena::shared();
        let offer = arena.offer().expect("this system has memfds");
        assert_eq!(Offer::decode(&offer.encode()), offer);
        let peer = PeerMemory::open(offer).unwrap();
        for len in [1, 1000, 20 << 20] {
            let mut buffer = arena.allocate(len);
            buffer.fill(len as u8);
            let at = arena.locate(&buffer).unwrap();
            assert_eq!(Location::decode(&at.encode()), Some(at));
            let read = peer.read(at).unwrap();
            assert_eq!(read, &buffer[..]);
            buffer[0] = 99;
            assert_eq!(read[0], 99, "it is the same memory");
            assert!(peer.read(Location { len: u64::MAX, ..at }).is_err());
            assert!(peer.read(Location { offset: 1 << 40, ..at }).is_err());
        }
    }

    #[test]
    fn an_offer_with_a_wrong_name_or_of_another_host_is_refused() {
        let arena = Arena::shared();
        let offer = arena.offer().unwrap();
        let mut strange = offer;
        strange.token[0] ^= 1;
        assert!(PeerMemory::open(strange).unwrap_err().contains("another process"));
        let mut far = offer;
        far.host.processes += 1;
        assert!(PeerMemory::open(far).unwrap_err().contains("another host"));
        let none = Offer { descriptor: 999_999, ..offer };
        assert!(PeerMemory::open(none).is_err());
        // An open file of this process that is no memory.
        let file = tempfile::tempfile().unwrap();
        let other = Offer { descriptor: file.as_raw_fd() as u32, ..offer };
        assert!(PeerMemory::open(other).is_err());
    }

    #[test]
    fn what_was_written_outlives_its_writer() {
        let arena = Arena::shared();
        let peer = PeerMemory::open(arena.offer().unwrap()).unwrap();
        let mut buffer = arena.allocate(1 << 20);
        buffer.fill(5);
        let read = peer.read(arena.locate(&buffer).unwrap()).unwrap();
        drop((buffer, arena));
        assert!(read.iter().all(|byte| *byte == 5));
    }

    #[test]
    fn nobody_else_can_write_or_shrink_it() {
        let arena = Arena::shared();
        let places = arena.places();
        let memfd = places.segments.values().next().unwrap().memfd.as_ref().unwrap();
        assert!(rustix::fs::ftruncate(memfd, 0).is_err());
        assert!(rustix::io::pwrite(memfd, b"x", 0).is_err());
    }
}
