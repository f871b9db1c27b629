//! A request with its payload and descriptors, taken apart.
//!
//! Promises: sizes and counts of descriptors are checked here and nowhere else; what the numbers
//! mean is checked by the session.

use std::os::fd::OwnedFd;

use zerocopy::{FromBytes, Immutable, KnownLayout};

use super::payload::{
    ConfigHead, DeviceState, Inflight, Log, MemoryHead, Region, SingleRegion, VringAddress,
    VringState,
};
use super::request::Request;
use super::{Header, Malformed};

/// Descriptors with one message: the regions of SET_MEM_TABLE. The specification says 8; the
/// `vhost` crate's front end sends up to 32.
pub const FDS_MAX: usize = 32;

/// Bytes of configuration space that a message may carry. Front ends allow themselves 256 (QEMU) or
/// 4096 (the `vhost` crate).
const CONFIG_BYTES_MAX: usize = 4096;

/// Bytes of a payload: GET_CONFIG of 4096 bytes with its head of 12. SET_MEM_TABLE with 32 regions
/// needs 8 + 32 x 32 = 1032.
pub const PAYLOAD_BYTES_MAX: usize = size_of::<ConfigHead>() + CONFIG_BYTES_MAX;

/// The number of a virtqueue, in messages that bring a descriptor for it.
const VRING_INDEX_MASK: u64 = 0xff;
/// In the same number: there is no descriptor.
const VRING_NO_FD: u64 = 1 << 8;

/// A request of a front end.
#[derive(Debug)]
#[expect(missing_docs, reason = "each is documented at `Request`, each field at its payload")]
pub enum Message {
    GetFeatures,
    SetFeatures(u64),
    SetOwner,
    ResetOwner,
    SetMemTable(Vec<(Region, OwnedFd)>),
    SetLogBase(Log, OwnedFd),
    SetLogFd(OwnedFd),
    SetVringNum(VringState),
    SetVringAddr(VringAddress),
    SetVringBase(VringState),
    GetVringBase(VringState),
    SetVringKick(u16, Option<OwnedFd>),
    SetVringCall(u16, Option<OwnedFd>),
    SetVringErr(u16, Option<OwnedFd>),
    GetProtocolFeatures,
    SetProtocolFeatures(u64),
    GetQueueNum,
    SetVringEnable(VringState),
    SetBackendReqFd(OwnedFd),
    GetConfig(ConfigHead),
    SetConfig(ConfigHead, Vec<u8>),
    /// With the bytes that its payload had: the reply has as many.
    GetInflightFd(Inflight, usize),
    SetInflightFd(Inflight, OwnedFd),
    ResetDevice,
    GetMaxMemSlots,
    AddMemReg(Region, OwnedFd),
    RemMemReg(Region),
    SetStatus(u64),
    GetStatus,
    SetDeviceStateFd(DeviceState, OwnedFd),
    CheckDeviceState,
}

impl Message {
    /// Takes a request apart. Descriptors that do not belong to it are closed.
    ///
    /// * `payload`: all of it.
    ///
    /// Errors: a size, or a number of descriptors, that this request cannot have.
    pub fn parse(
        request: Request,
        header: &Header,
        payload: &[u8],
        fds: Vec<OwnedFd>,
    ) -> Result<Message, Malformed> {
        header.check(request.name())?;
        let mut parts = Parts { name: request.name(), payload, fds };
        let message = parts.message(request)?;
        if !parts.fds.is_empty() {
            let count = parts.fds.len();
            return Err(parts.wrong(format!("{count} descriptors too many")));
        }
        Ok(message)
    }
}

/// What is left of a message.
struct Parts<'a> {
    name: &'static str,
    payload: &'a [u8],
    fds: Vec<OwnedFd>,
}

impl Parts<'_> {
    fn wrong(&self, what: impl std::fmt::Display) -> Malformed {
        Malformed(format!("{}: {what}", self.name))
    }

    fn message(&mut self, request: Request) -> Result<Message, Malformed> {
        Ok(match request {
            Request::GetFeatures => self.empty(Message::GetFeatures)?,
            Request::SetFeatures => Message::SetFeatures(self.exactly()?),
            Request::SetOwner => self.empty(Message::SetOwner)?,
            Request::ResetOwner => self.empty(Message::ResetOwner)?,
            Request::SetMemTable => self.memory_table()?,
            Request::SetLogBase => Message::SetLogBase(self.exactly()?, self.fd()?),
            Request::SetLogFd => {
                self.empty_or_number()?;
                Message::SetLogFd(self.fd()?)
            }
            Request::SetVringNum => Message::SetVringNum(self.exactly()?),
            Request::SetVringAddr => Message::SetVringAddr(self.exactly()?),
            Request::SetVringBase => Message::SetVringBase(self.exactly()?),
            Request::GetVringBase => Message::GetVringBase(self.exactly()?),
            Request::SetVringKick => {
                let (index, fd) = self.vring_fd()?;
                Message::SetVringKick(index, fd)
            }
            Request::SetVringCall => {
                let (index, fd) = self.vring_fd()?;
                Message::SetVringCall(index, fd)
            }
            Request::SetVringErr => {
                let (index, fd) = self.vring_fd()?;
                Message::SetVringErr(index, fd)
            }
            Request::GetProtocolFeatures => self.empty(Message::GetProtocolFeatures)?,
            Request::SetProtocolFeatures => Message::SetProtocolFeatures(self.exactly()?),
            Request::GetQueueNum => self.empty(Message::GetQueueNum)?,
            Request::SetVringEnable => Message::SetVringEnable(self.exactly()?),
            Request::SetBackendReqFd => {
                self.empty_or_number()?;
                Message::SetBackendReqFd(self.fd()?)
            }
            Request::GetConfig => self.get_config()?,
            Request::SetConfig => self.set_config()?,
            Request::GetInflightFd => Message::GetInflightFd(self.inflight()?, self.payload.len()),
            Request::SetInflightFd => Message::SetInflightFd(self.inflight()?, self.fd()?),
            Request::ResetDevice => self.empty(Message::ResetDevice)?,
            Request::GetMaxMemSlots => self.empty(Message::GetMaxMemSlots)?,
            Request::AddMemReg => {
                Message::AddMemReg(self.exactly::<SingleRegion>()?.region, self.fd()?)
            }
            Request::RemMemReg => {
                // The specification: some front ends send the region's descriptor here too; it is
                // to be closed.
                self.fds.pop();
                Message::RemMemReg(self.exactly::<SingleRegion>()?.region)
            }
            Request::SetStatus => Message::SetStatus(self.exactly()?),
            Request::GetStatus => self.empty(Message::GetStatus)?,
            Request::SetDeviceStateFd => Message::SetDeviceStateFd(self.exactly()?, self.fd()?),
            Request::CheckDeviceState => self.empty(Message::CheckDeviceState)?,
        })
    }

    fn size_is(&self, size: usize) -> Result<(), Malformed> {
        if self.payload.len() == size {
            Ok(())
        } else {
            Err(self.wrong(format!("payload of {} bytes, {size} expected", self.payload.len())))
        }
    }

    fn empty(&self, message: Message) -> Result<Message, Malformed> {
        self.size_is(0).map(|()| message)
    }

    /// For messages that are a descriptor and nothing else: some send a number with it.
    fn empty_or_number(&self) -> Result<(), Malformed> {
        if self.payload.len() == size_of::<u64>() { Ok(()) } else { self.size_is(0) }
    }

    fn exactly<T: FromBytes + KnownLayout + Immutable>(&self) -> Result<T, Malformed> {
        self.size_is(size_of::<T>())?;
        T::read_from_bytes(self.payload).map_err(|_| self.wrong("short payload"))
    }

    /// The first of the descriptors.
    fn fd(&mut self) -> Result<OwnedFd, Malformed> {
        if self.fds.is_empty() {
            return Err(self.wrong("its descriptor is missing"));
        }
        Ok(self.fds.remove(0))
    }

    fn vring_fd(&mut self) -> Result<(u16, Option<OwnedFd>), Malformed> {
        let number: u64 = self.exactly()?;
        if number & !(VRING_INDEX_MASK | VRING_NO_FD) != 0 {
            return Err(self.wrong(format!("unknown bits in {number:#x}")));
        }
        let index = (number & VRING_INDEX_MASK) as u16;
        let fd = if number & VRING_NO_FD == 0 { Some(self.fd()?) } else { None };
        Ok((index, fd))
    }

    fn memory_table(&mut self) -> Result<Message, Malformed> {
        let Ok((head, rest)) = MemoryHead::read_from_prefix(self.payload) else {
            return Err(self.wrong(format!("payload of {} bytes", self.payload.len())));
        };
        let count = head.num_regions as usize;
        if count > FDS_MAX {
            return Err(self.wrong(format!("{count} regions, at most {FDS_MAX} are possible")));
        }
        // Some front ends always send room for all regions that there may be.
        let bytes = count * size_of::<Region>();
        let Some(rest) = rest.get(..bytes) else {
            return Err(self.wrong(format!("{count} regions in {} bytes", rest.len())));
        };
        if self.fds.len() != count {
            return Err(self.wrong(format!("{count} regions, {} descriptors", self.fds.len())));
        }
        let regions = rest
            .chunks_exact(size_of::<Region>())
            .map(|bytes| Region::read_from_bytes(bytes).map_err(|_| self.wrong("short region")))
            .collect::<Result<Vec<Region>, Malformed>>()?;
        Ok(Message::SetMemTable(regions.into_iter().zip(self.fds.drain(..)).collect()))
    }

    fn config_head(&self) -> Result<(ConfigHead, &[u8]), Malformed> {
        let Ok((head, rest)) = ConfigHead::read_from_prefix(self.payload) else {
            return Err(self.wrong(format!("payload of {} bytes", self.payload.len())));
        };
        if head.size as usize > CONFIG_BYTES_MAX {
            let size = head.size;
            return Err(
                self.wrong(format!("{size} bytes, at most {CONFIG_BYTES_MAX} are possible"))
            );
        }
        Ok((head, rest))
    }

    /// The request has room for what is asked for, or only says how much that is.
    fn get_config(&self) -> Result<Message, Malformed> {
        let (head, rest) = self.config_head()?;
        if !rest.is_empty() && rest.len() != head.size as usize {
            let (size, len) = (head.size, rest.len());
            return Err(self.wrong(format!("{size} bytes asked for, room for {len}")));
        }
        Ok(Message::GetConfig(head))
    }

    fn set_config(&self) -> Result<Message, Malformed> {
        let (head, rest) = self.config_head()?;
        if rest.len() != head.size as usize {
            let (size, len) = (head.size, rest.len());
            return Err(self.wrong(format!("{size} bytes announced, {len} sent")));
        }
        Ok(Message::SetConfig(head, rest.to_vec()))
    }

    fn inflight(&self) -> Result<Inflight, Malformed> {
        let full = size_of::<Inflight>();
        if self.payload.len() != Inflight::SHORT_BYTES {
            self.size_is(full)?;
        }
        let mut bytes = [0; size_of::<Inflight>()];
        bytes[..self.payload.len()].copy_from_slice(self.payload);
        let inflight: Inflight = zerocopy::transmute!(bytes);
        Ok(Inflight { padding: 0, ..inflight })
    }
}
