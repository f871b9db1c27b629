//! What each request does.
//!
//! Promises: control thread; one request at a time, in the order in which they came. A request that
//! makes no sense or is out of order is refused before the back end hears of it; how the front end
//! learns of that is as the specification has it ([`refusal`]). The device is changed by
//! [`Backend`] only.

use zerocopy::IntoBytes;

use super::backend::{Backend, ConfigWrite, InflightArea, RegionSetup, StateDirection};
use super::regions::Regions;
use super::{Fault, Session, stop, vring};
use crate::protocol::features;
use crate::protocol::{
    ConfigHead, DeviceState, Header, Inflight, Log, Message, Region, Reply, Request, VringAddress,
    VringState,
};

/// In the reply to SET_DEVICE_STATE_FD: no descriptor comes with it.
const STATE_NO_FD: u64 = 1 << 8;

/// How a front end learns that a request was refused.
pub(super) enum Learns {
    /// By the request's own reply.
    Reply(Reply),
    /// By the answer that any message may ask for, otherwise by the end of the connection.
    Acknowledge,
    /// By the answer that any message may ask for; otherwise not, as nothing depends on it.
    Nobody,
    /// By the end of the connection.
    End,
}

/// How the front end learns that `request` was refused.
pub(super) fn refusal(request: Request, header: &Header, payload: &[u8]) -> Learns {
    let number = header.request;
    match request {
        // The specification: an error is a reply without payload.
        Request::GetConfig => Learns::Reply(Reply::new(number, &[])),
        // An area of no bytes: the front end does without.
        Request::GetInflightFd => {
            let none = Inflight::default();
            let len = payload.len().min(size_of::<Inflight>());
            Learns::Reply(Reply::new(number, &none.as_bytes()[..len]))
        }
        Request::SetDeviceStateFd => Learns::Reply(Reply::number(number, STATE_NO_FD | 1)),
        Request::CheckDeviceState => Learns::Reply(Reply::number(number, 1)),
        // A guest that writes where nothing can be written changes nothing on real hardware either.
        Request::SetConfig => Learns::Nobody,
        // These have replies with no room for an error.
        Request::GetFeatures
        | Request::GetProtocolFeatures
        | Request::GetQueueNum
        | Request::GetMaxMemSlots
        | Request::GetStatus
        | Request::GetVringBase
        | Request::SetLogBase => Learns::End,
        _ => Learns::Acknowledge,
    }
}

impl Session {
    /// Does it, and returns the request's own reply if it has one.
    ///
    /// * `number`: of the request.
    pub(super) fn serve(
        &mut self,
        backend: &mut dyn Backend,
        number: u32,
        message: Message,
    ) -> Result<Option<Reply>, Fault> {
        let told = |value: u64| Ok(Some(Reply::number(number, value)));
        match message {
            Message::GetFeatures => return told(self.config.features),
            Message::GetProtocolFeatures => return told(self.config.protocol_features),
            Message::GetQueueNum => return told(u64::from(self.config.queues_max)),
            Message::GetMaxMemSlots => return told(u64::from(self.config.mem_slots_max)),
            Message::GetStatus => return told(u64::from(self.device_status(backend))),
            Message::GetVringBase(state) => return self.get_vring_base(backend, number, &state),
            Message::GetConfig(head) => return get_config(backend, number, &head),
            Message::GetInflightFd(inflight, len) => {
                return self.get_inflight(backend, number, &inflight, len);
            }
            Message::SetDeviceStateFd(state, fd) => {
                let direction = self.state_direction(&state)?;
                return Ok(Some(match backend.set_device_state_fd(direction, fd)? {
                    Some(fd) => Reply::number(number, 0).with_fd(fd),
                    None => Reply::number(number, STATE_NO_FD),
                }));
            }
            Message::CheckDeviceState => {
                backend.check_device_state()?;
                return told(0);
            }
            Message::SetLogBase(log, fd) => {
                check_range("log", log.mmap_size, log.mmap_offset)?;
                backend.set_log(fd, log.mmap_size, log.mmap_offset)?;
                return Ok(Some(log_reply(number, &log)));
            }
            // The front end that connects is the owner, and the only one.
            Message::SetOwner => self.claimed = true,
            Message::ResetOwner => self.reset_owner(backend),
            Message::SetFeatures(features) => self.set_features(backend, features)?,
            Message::SetProtocolFeatures(features) => self.set_protocol_features(features)?,
            Message::SetMemTable(table) => self.set_memory(backend, table)?,
            Message::AddMemReg(region, fd) => self.add_region(backend, &region, fd)?,
            Message::RemMemReg(region) => self.remove_region(backend, &region)?,
            Message::SetLogFd(fd) => backend.set_log_event(fd)?,
            Message::SetVringNum(state) => self.set_vring_num(&state)?,
            Message::SetVringAddr(address) => self.set_vring_addr(backend, &address)?,
            Message::SetVringBase(state) => {
                let vring = self.vring_at_rest(state.index)?;
                vring.base = state.num;
                vring.base_at_reset = None;
            }
            Message::SetVringKick(index, kick) => self.set_vring_kick(backend, index, kick)?,
            Message::SetVringCall(index, call) => {
                let (index, _) = self.vring(u32::from(index))?;
                backend.set_vring_call(index, call)?;
            }
            Message::SetVringErr(index, err) => {
                let (index, _) = self.vring(u32::from(index))?;
                backend.set_vring_err(index, err)?;
            }
            Message::SetVringEnable(state) => self.set_vring_enable(backend, &state)?,
            Message::SetBackendReqFd(fd) => backend.set_backend_channel(fd)?,
            Message::SetConfig(head, bytes) => {
                let write = match head.flags {
                    0 => ConfigWrite::Driver,
                    1 => ConfigWrite::Migration,
                    flags => return Err(format!("unknown flags {flags:#x}").into()),
                };
                backend.set_config(head.start(), &bytes, write)?;
            }
            Message::SetInflightFd(inflight, fd) => self.set_inflight(backend, &inflight, fd)?,
            Message::ResetDevice => self.reset(backend),
            Message::SetStatus(status) => self.set_status(backend, status)?,
        }
        Ok(None)
    }

    fn device_status(&self, backend: &dyn Backend) -> u8 {
        let broken = if backend.needs_reset() { features::STATUS_NEEDS_RESET } else { 0 };
        self.status | broken
    }

    fn set_status(&mut self, backend: &mut dyn Backend, status: u64) -> Result<(), Fault> {
        let status = u8::try_from(status).map_err(|_| format!("{status:#x} is no status"))?;
        if status == 0 {
            self.reset(backend);
        } else {
            self.status = status;
            backend.set_status(status);
        }
        Ok(())
    }

    /// Rings stop, features and status go; memory, protocol features, call and error eventfds stay:
    /// QEMU sends those before its first reset and not again.
    fn reset(&mut self, backend: &mut dyn Backend) {
        self.stop_all(backend);
        (0..self.config.queues_max).for_each(|index| backend.retire_vring(index));
        self.vrings.iter_mut().for_each(vring::Vring::reset);
        self.features = 0;
        self.status = 0;
        backend.reset();
    }

    /// The specification leaves us the choice between nothing and this: all rings stop, as by
    /// GET_VRING_BASE.
    fn reset_owner(&mut self, backend: &mut dyn Backend) {
        self.stop_all(backend);
        for vring in &mut self.vrings {
            vring.kick = None;
        }
    }

    fn set_features(&mut self, backend: &mut dyn Backend, features: u64) -> Result<(), Fault> {
        let unknown = features & !self.config.features;
        if unknown != 0 {
            return Err(format!("features {unknown:#x} were not offered").into());
        }
        // Migration turns the log on and off under rings that run.
        let changed = (features ^ self.features) & !features::F_LOG_ALL;
        if changed != 0 && self.running() > 0 {
            return Err(format!("features {changed:#x} change while virtqueues run").into());
        }
        backend.set_features(features)?;
        self.features = features;
        self.claimed = true;
        Ok(())
    }

    fn set_protocol_features(&mut self, features: u64) -> Result<(), Fault> {
        let unknown = features & !self.config.protocol_features;
        if unknown != 0 {
            return Err(format!("protocol features {unknown:#x} were not offered").into());
        }
        self.protocol_features = features;
        Ok(())
    }

    fn set_memory(
        &mut self,
        backend: &mut dyn Backend,
        table: Vec<(Region, std::os::fd::OwnedFd)>,
    ) -> Result<(), Fault> {
        self.room_for(table.len())?;
        let regions: Vec<&Region> = table.iter().map(|(region, _)| region).collect();
        let regions = Regions::of(&regions)?;
        let setups = table.into_iter().map(|(region, fd)| setup(&region, fd)).collect();
        backend.set_memory(setups)?;
        self.regions = regions;
        Ok(())
    }

    fn add_region(
        &mut self,
        backend: &mut dyn Backend,
        region: &Region,
        fd: std::os::fd::OwnedFd,
    ) -> Result<(), Fault> {
        self.room_for(self.regions.len() + 1)?;
        self.regions.check(region)?;
        backend.add_region(setup(region, fd))?;
        self.regions.add(region);
        Ok(())
    }

    fn remove_region(&mut self, backend: &mut dyn Backend, region: &Region) -> Result<(), Fault> {
        let Region { guest_addr, size, user_addr, .. } = *region;
        let Some(place) = self.regions.find(region) else {
            return Err(format!(
                "no region of {size:#x} bytes at {guest_addr:#x}, {user_addr:#x} in the front end"
            )
            .into());
        };
        backend.remove_region(guest_addr, size, user_addr)?;
        self.regions.remove(place);
        Ok(())
    }

    fn room_for(&self, regions: usize) -> Result<(), Fault> {
        let most = self.config.mem_slots_max;
        if regions > usize::from(most) {
            return Err(format!("{regions} regions, at most {most} are possible").into());
        }
        Ok(())
    }

    /// A virtqueue that does not run.
    fn vring_at_rest(&mut self, index: u32) -> Result<&mut vring::Vring, Fault> {
        let (_, vring) = self.vring(index)?;
        if vring.running {
            return Err(format!("virtqueue {index} runs").into());
        }
        Ok(vring)
    }

    fn set_vring_num(&mut self, state: &VringState) -> Result<(), Fault> {
        let (num, most) = (state.num, self.config.queue_size_max);
        let size = u16::try_from(num).ok().filter(|size| (1..=most).contains(size));
        let vring = self.vring_at_rest(state.index)?;
        vring.size = Some(size.ok_or_else(|| format!("size {num}, 1 to {most} are possible"))?);
        Ok(())
    }

    fn set_vring_addr(
        &mut self,
        backend: &mut dyn Backend,
        address: &VringAddress,
    ) -> Result<(), Fault> {
        let (index, vring) = self.vring(address.index)?;
        vring::check(address)?;
        if vring.running
            && let Some(before) = vring.address
        {
            if vring::moved(&before, address) {
                return Err(format!("virtqueue {index} runs and cannot be moved").into());
            }
            backend.set_vring_log(index, vring::log(address))?;
        }
        vring.address = Some(*address);
        Ok(())
    }

    fn set_vring_kick(
        &mut self,
        backend: &mut dyn Backend,
        index: u16,
        kick: Option<std::os::fd::OwnedFd>,
    ) -> Result<(), Fault> {
        let (index, vring) = self.vring(u32::from(index))?;
        let kick = kick.ok_or("without an eventfd; polling for kicks is not offered".to_owned())?;
        if vring.running {
            stop(backend, index, vring)?;
        }
        vring.kick = Some(kick);
        self.settle(backend, index)
    }

    fn set_vring_enable(
        &mut self,
        backend: &mut dyn Backend,
        state: &VringState,
    ) -> Result<(), Fault> {
        let (index, vring) = self.vring(state.index)?;
        let enabled = match state.num {
            0 => false,
            1 => true,
            other => return Err(format!("{other} is neither 0 nor 1").into()),
        };
        vring.enabled = Some(enabled);
        self.settle(backend, index)
    }

    fn get_vring_base(
        &mut self,
        backend: &mut dyn Backend,
        number: u32,
        state: &VringState,
    ) -> Result<Option<Reply>, Fault> {
        let (index, vring) = self.vring(state.index)?;
        vring.kick = None;
        if vring.running {
            stop(backend, index, vring)?;
        }
        backend.retire_vring(index);
        let stands = vring.base_at_reset.take().unwrap_or(vring.base);
        let state = VringState { index: state.index, num: stands };
        Ok(Some(Reply::new(number, state.as_bytes())))
    }

    fn get_inflight(
        &mut self,
        backend: &mut dyn Backend,
        number: u32,
        asked: &Inflight,
        len: usize,
    ) -> Result<Option<Reply>, Fault> {
        self.check_inflight(asked)?;
        // What they note goes into the area that they were started with, which would be lost with
        // the process.
        self.check_at_rest()?;
        let area = backend.get_inflight(asked.num_queues, asked.queue_size)?;
        let answer = Inflight { mmap_size: area.size, mmap_offset: area.offset, ..*asked };
        Ok(Some(Reply::new(number, &answer.as_bytes()[..len]).with_fd(area.fd)))
    }

    fn set_inflight(
        &mut self,
        backend: &mut dyn Backend,
        inflight: &Inflight,
        fd: std::os::fd::OwnedFd,
    ) -> Result<(), Fault> {
        self.check_inflight(inflight)?;
        check_range("area", inflight.mmap_size, inflight.mmap_offset)?;
        self.check_at_rest()?;
        let area = InflightArea { fd, size: inflight.mmap_size, offset: inflight.mmap_offset };
        backend.set_inflight(area, inflight.num_queues, inflight.queue_size)?;
        Ok(())
    }

    /// No virtqueue runs.
    fn check_at_rest(&self) -> Result<(), Fault> {
        if self.running() > 0 {
            return Err("virtqueues run".to_owned().into());
        }
        Ok(())
    }

    fn check_inflight(&self, inflight: &Inflight) -> Result<(), Fault> {
        let Inflight { num_queues, queue_size, .. } = *inflight;
        let (queues_max, size_max) = (self.config.queues_max, self.config.queue_size_max);
        if num_queues == 0 || num_queues > queues_max {
            return Err(format!("{num_queues} virtqueues, 1 to {queues_max} are possible").into());
        }
        if queue_size == 0 || queue_size > size_max {
            return Err(format!("size {queue_size}, 1 to {size_max} are possible").into());
        }
        Ok(())
    }

    fn state_direction(&self, state: &DeviceState) -> Result<StateDirection, Fault> {
        if state.phase != 0 {
            return Err(format!("phase {} is not known", state.phase).into());
        }
        self.check_at_rest()?;
        match state.direction {
            0 => Ok(StateDirection::Save),
            1 => Ok(StateDirection::Load),
            other => Err(format!("direction {other} is not known").into()),
        }
    }
}

fn setup(region: &Region, fd: std::os::fd::OwnedFd) -> RegionSetup {
    let Region { guest_addr, size, user_addr, mmap_offset } = *region;
    RegionSetup { guest_addr, size, user_addr, mmap_offset, fd }
}

fn check_range(what: &str, size: u64, offset: u64) -> Result<(), Fault> {
    if size == 0 || offset.checked_add(size).is_none() {
        return Err(format!("{what} of {size:#x} bytes at {offset:#x}").into());
    }
    Ok(())
}

fn get_config(
    backend: &mut dyn Backend,
    number: u32,
    head: &ConfigHead,
) -> Result<Option<Reply>, Fault> {
    let head_bytes = size_of::<ConfigHead>();
    let mut payload = vec![0; head_bytes + head.size as usize];
    payload[..head_bytes].copy_from_slice(head.as_bytes());
    backend.get_config(head.start(), &mut payload[head_bytes..])?;
    Ok(Some(Reply::new(number, &payload)))
}

/// QEMU waits for any reply, the `vhost` crate's front end for one that repeats the request.
fn log_reply(number: u32, log: &Log) -> Reply {
    Reply::new(number, log.as_bytes())
}
