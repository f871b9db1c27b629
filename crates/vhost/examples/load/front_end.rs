//! The front end: agrees on features, announces memory, starts queues.

use std::error::Error;
use std::os::fd::AsRawFd;

use ringdisk_guest::Layout;
use ringdisk_guest::driver::{Driver, DriverConfig, GUEST_BASE, GuestRam, USER_BASE};
use vhost::vhost_user::message::{VhostUserHeaderFlag, VhostUserProtocolFeatures};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use vmm_sys_util::eventfd::EventFd;

use crate::arguments::Arguments;
use crate::lane::Lane;

/// VIRTIO_RING_F_INDIRECT_DESC, VIRTIO_RING_F_EVENT_IDX, VHOST_USER_F_PROTOCOL_FEATURES,
/// VIRTIO_F_VERSION_1.
const INDIRECT: u64 = 1 << 28;
const EVENT_IDX: u64 = 1 << 29;
const PROTOCOL: u64 = 1 << 30;
const VERSION_1: u64 = 1 << 32;
/// VIRTIO_BLK_F_FLUSH: without it a device has to make each write durable at once.
const FLUSH: u64 = 1 << 9;
/// VIRTIO_BLK_F_MQ.
const MQ: u64 = 1 << 12;

pub(crate) struct FrontEnd {
    frontend: Frontend,
    ram: GuestRam,
}

impl FrontEnd {
    /// Errors: nobody is there; it does not offer what is needed.
    pub(crate) fn connect(arguments: &Arguments) -> Result<FrontEnd, Box<dyn Error>> {
        let mut frontend = Frontend::connect(&arguments.socket, u64::from(arguments.queues))?;
        let mut wanted = EVENT_IDX | PROTOCOL | VERSION_1 | FLUSH;
        if arguments.queues > 1 {
            wanted |= MQ;
        }
        if arguments.indirect {
            wanted |= INDIRECT;
        }
        let offered = frontend.get_features()?;
        if offered & wanted != wanted {
            return Err(format!("features {:#x} are not offered", wanted & !offered).into());
        }
        frontend.set_owner()?;
        frontend.set_features(wanted)?;
        let known = VhostUserProtocolFeatures::MQ | VhostUserProtocolFeatures::REPLY_ACK;
        let offered = frontend.get_protocol_features()?;
        frontend.set_protocol_features(offered & known)?;
        if arguments.queues > 1 && frontend.get_queue_num()? < u64::from(arguments.queues) {
            return Err("not so many queues are offered".into());
        }
        frontend.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
        let data = u64::from(arguments.block).next_multiple_of(4096) + 64;
        let queue = |index| u64::from(arguments.depth(index)) * data + (256 << 10);
        let all: u64 = (0..arguments.queues).map(queue).sum();
        let ram = GuestRam::new(all.next_multiple_of(2 << 20))?;
        frontend.set_mem_table(&[VhostUserMemoryRegionInfo {
            guest_phys_addr: GUEST_BASE,
            memory_size: ram.size(),
            userspace_addr: USER_BASE,
            mmap_offset: 0,
            mmap_handle: ram.fd().as_raw_fd(),
        }])?;
        Ok(FrontEnd { frontend, ram })
    }

    /// Starts a queue.
    pub(crate) fn start(
        &mut self,
        arguments: &Arguments,
        index: u16,
    ) -> Result<Lane, Box<dyn Error>> {
        let config = DriverConfig {
            layout: Layout::Split,
            size: arguments.queue_size(index),
            event_idx: true,
            indirect: if arguments.indirect { 3 } else { 0 },
        };
        let driver = Driver::new(&mut self.ram, config)?;
        let [descriptors, avail, used] = driver.user_addresses();
        let (kick, call) = (EventFd::new(0)?, EventFd::new(0)?);
        let at = usize::from(index);
        self.frontend.set_vring_num(at, config.size)?;
        self.frontend.set_vring_addr(
            at,
            &VringConfigData {
                queue_max_size: config.size,
                queue_size: config.size,
                flags: 0,
                desc_table_addr: descriptors,
                used_ring_addr: used,
                avail_ring_addr: avail,
                log_addr: None,
            },
        )?;
        self.frontend.set_vring_base(at, 0)?;
        self.frontend.set_vring_call(at, &call)?;
        self.frontend.set_vring_kick(at, &kick)?;
        self.frontend.set_vring_enable(at, true)?;
        Lane::new(arguments, index, driver, &mut self.ram, (kick, call))
    }

    /// Stops the queues.
    pub(crate) fn stop(&mut self, queues: u16) -> Result<(), Box<dyn Error>> {
        for index in 0..queues {
            self.frontend.get_vring_base(usize::from(index))?;
        }
        Ok(())
    }
}
