//! A back end that does nothing, but insists on what a session promises. Also used by the fuzz
//! target.

use std::collections::HashSet;
use std::os::fd::OwnedFd;

use super::{Backend, ConfigWrite, InflightArea, Refusal, RegionSetup, StateDirection, VringSetup};

/// What is asked of it, in words; and what it was told.
#[derive(Debug, Default)]
pub(super) struct Mock {
    pub(super) calls: Vec<String>,
    /// Calls, by name, that are refused.
    pub(super) refuse: HashSet<&'static str>,
    pub(super) broken: bool,
    pub(super) running: HashSet<u16>,
    pub(super) features: u64,
    pub(super) regions: Vec<(u64, u64, u64)>,
    pub(super) config: Vec<u8>,
    pub(super) channel: Option<OwnedFd>,
}

pub(super) const PACKED: u64 = 1 << 34;

pub(super) fn eventfd() -> OwnedFd {
    rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).expect("an eventfd")
}

impl Mock {
    fn called(&mut self, name: &'static str, with: impl std::fmt::Display) -> Result<(), Refusal> {
        let words = format!("{name} {with}");
        self.calls.push(words.trim_end().to_owned());
        // Nothing that a fuzzer sends grows this without bound.
        self.calls.drain(..self.calls.len().saturating_sub(1000));
        if self.refuse.contains(name) { Err("not today".into()) } else { Ok(()) }
    }

    fn no_overlap(&self, guest_addr: u64, size: u64) {
        for (start, len, _) in &self.regions {
            assert!(guest_addr + size <= *start || start + len <= guest_addr, "overlap");
        }
    }
}

impl Backend for Mock {
    fn set_features(&mut self, features: u64) -> Result<(), Refusal> {
        let log_only = (features ^ self.features) & !(1 << 26) == 0;
        assert!(self.running.is_empty() || log_only, "features under rings that run");
        self.called("set_features", format_args!("{features:#x}"))?;
        self.features = features;
        Ok(())
    }

    fn set_status(&mut self, status: u8) {
        assert_ne!(status, 0);
        let _ = self.called("set_status", status);
    }

    fn needs_reset(&self) -> bool {
        self.broken
    }

    fn reset(&mut self) {
        assert!(self.running.is_empty());
        self.features = 0;
        self.broken = false;
        let _ = self.called("reset", "");
    }

    fn disconnect(&mut self) {
        assert!(self.running.is_empty());
        self.regions.clear();
        self.channel = None;
        let _ = self.called("disconnect", "");
    }

    fn set_memory(&mut self, regions: Vec<RegionSetup>) -> Result<(), Refusal> {
        self.called("set_memory", regions.len())?;
        self.regions.clear();
        for region in regions {
            self.no_overlap(region.guest_addr, region.size);
            self.regions.push((region.guest_addr, region.size, region.user_addr));
        }
        Ok(())
    }

    fn add_region(&mut self, region: RegionSetup) -> Result<(), Refusal> {
        assert!(region.size > 0);
        self.no_overlap(region.guest_addr, region.size);
        self.called("add_region", format_args!("{:#x}+{:#x}", region.guest_addr, region.size))?;
        self.regions.push((region.guest_addr, region.size, region.user_addr));
        Ok(())
    }

    fn remove_region(&mut self, guest_addr: u64, size: u64, user_addr: u64) -> Result<(), Refusal> {
        let place = self.regions.iter().position(|known| *known == (guest_addr, size, user_addr));
        let place = place.expect("a region that was added");
        self.called("remove_region", format_args!("{guest_addr:#x}"))?;
        self.regions.swap_remove(place);
        Ok(())
    }

    fn start_vring(&mut self, index: u16, setup: VringSetup) -> Result<(), Refusal> {
        assert!(!self.running.contains(&index), "ring {index} runs already");
        assert!(!self.regions.is_empty());
        assert_eq!(setup.packed, self.features & PACKED != 0);
        assert!(setup.size > 0);
        assert!(setup.packed || setup.size.is_power_of_two() && setup.base < 0x1_0000);
        assert!(setup.descriptor != 0 && setup.descriptor.is_multiple_of(16));
        assert!(setup.used != 0 && setup.used.is_multiple_of(4) && setup.available != 0);
        assert!(setup.available.is_multiple_of(if setup.packed { 4 } else { 2 }));
        let (size, base) = (setup.size, setup.base);
        let log = setup.log.map(|at| format!(" log {at:#x}")).unwrap_or_default();
        self.called("start", format_args!("{index} size {size} base {base:#x}{log}"))?;
        self.running.insert(index);
        Ok(())
    }

    fn resume_vring(&mut self, index: u16, setup: VringSetup) -> Result<(), Refusal> {
        if !self.regions.is_empty() {
            return self.start_vring(index, setup);
        }
        assert!(self.running.insert(index), "ring {index} runs already");
        self.called("wait", format_args!("{index} base {:#x}", setup.base))
    }

    fn stop_vring(&mut self, index: u16) -> Result<u32, Refusal> {
        assert!(self.running.remove(&index), "ring {index} does not run");
        self.called("stop", index)?;
        Ok(if self.features & PACKED == 0 { 0x1000 } else { 0x9000_9000 } + u32::from(index))
    }

    fn retire_vring(&mut self, index: u16) {
        assert!(!self.running.contains(&index), "ring {index} runs");
    }

    fn set_vring_call(&mut self, index: u16, call: Option<OwnedFd>) -> Result<(), Refusal> {
        let what = if call.is_some() { "given" } else { "none" };
        self.called("call", format_args!("{index} {what}"))
    }

    fn set_vring_err(&mut self, index: u16, _: Option<OwnedFd>) -> Result<(), Refusal> {
        self.called("err", index)
    }

    fn set_vring_log(&mut self, index: u16, log: Option<u64>) -> Result<(), Refusal> {
        assert!(self.running.contains(&index));
        self.called("log_ring", format_args!("{index} {log:x?}"))
    }

    fn get_inflight(&mut self, queues: u16, queue_size: u16) -> Result<InflightArea, Refusal> {
        assert!(queues > 0 && queue_size > 0);
        self.called("get_inflight", format_args!("{queues} x {queue_size}"))?;
        Ok(InflightArea { fd: eventfd(), size: 4096, offset: 0 })
    }

    fn set_inflight(
        &mut self,
        area: InflightArea,
        queues: u16,
        queue_size: u16,
    ) -> Result<(), Refusal> {
        assert!(self.running.is_empty() && area.size > 0);
        self.called("set_inflight", format_args!("{queues} x {queue_size}"))
    }

    fn set_log(&mut self, _: OwnedFd, size: u64, offset: u64) -> Result<(), Refusal> {
        assert!(offset.checked_add(size).is_some());
        self.called("set_log", size)
    }

    fn set_log_event(&mut self, _: OwnedFd) -> Result<(), Refusal> {
        self.called("set_log_event", "")
    }

    fn get_config(&mut self, offset: u32, bytes: &mut [u8]) -> Result<(), Refusal> {
        self.called("get_config", format_args!("{offset} {}", bytes.len()))?;
        let from = self.config.get(offset as usize..).unwrap_or_default();
        let len = from.len().min(bytes.len());
        bytes[..len].copy_from_slice(&from[..len]);
        Ok(())
    }

    fn set_config(&mut self, offset: u32, bytes: &[u8], _: ConfigWrite) -> Result<(), Refusal> {
        self.called("set_config", format_args!("{offset} {bytes:?}"))
    }

    fn set_backend_channel(&mut self, socket: OwnedFd) -> Result<(), Refusal> {
        self.channel = Some(socket);
        self.called("channel", "")
    }

    fn set_device_state_fd(
        &mut self,
        direction: StateDirection,
        _: OwnedFd,
    ) -> Result<Option<OwnedFd>, Refusal> {
        assert!(self.running.is_empty());
        self.called("device_state", format_args!("{direction:?}"))?;
        Ok(None)
    }

    fn check_device_state(&mut self) -> Result<(), Refusal> {
        self.called("check_device_state", "")
    }
}
